"""The words a submission may not use, and why. Lean v4.9.0-rc1 and Mathlib of June 2024, with the later commands up to v4.35.

A command can begin anywhere, not only in the first column (`:= trivial axiom cheat : False` is two commands), so a refused word is
refused wherever it is code. Allowed commands: theorem, lemma, def, abbrev, example, open, namespace, section, end, variable, universe,
set_option (of listed options), include, omit, mutual, with the modifiers private, protected, noncomputable, nonrec, local, scoped."""

_COMMANDS = {
    "adds an axiom or an opaque constant": "axiom opaque init_quot",
    "changes what code means behind the kernel's back": "unsafe partial implemented_by extern",
    "can change what the statement's words mean": "instance class structure inductive coinductive deriving unif_hint export alias",
    "sets attributes": "attribute initialize_simps_projections add_decl_doc norm_cast_add_elim",
    "adds syntax": (
        "macro macro_rules syntax declare_syntax_cat notation notation3 infix infixl infixr prefix postfix binder_predicate"
        " register_parser_alias register_tactic_tag tactic_extension irreducible_def precheckedNotation"
    ),
    "runs code while the file is checked": (
        "elab elab_rules run_cmd run_tac run_meta run_elab run_conv run_conv_tac by_elab initialize builtin_initialize simproc simproc_decl"
        " dsimproc dsimproc_decl builtin_simproc builtin_simproc_decl builtin_dsimproc builtin_dsimproc_decl declare_config_elab"
        " declare_simp_like_tactic declare_command_config_elab eval% include_str run_tacq"
    ),
    "registers something for the whole library": (
        "register_option register_builtin_option register_simp_attr register_label_attr register_tag_attr register_error_explanation"
        " register_hint register_linter_set declare_aesop_rule_sets add_aesop_rules erase_aesop_rules library_note set_premise_selector"
        " set_library_suggestions insert_to_additive_translation grind_pattern show_panel_widgets recommended_spelling"
        " mk_iff_of_inductive_prop"
        " gen_injective_theorems% suppress_compilation unsuppress_compilation seal unseal restate_axiom"
        " extend_docs compile_inductive% compile_def% proof_wanted unset_option deprecated_module deprecated_syntax docs_to_verso sudo"
    ),
    "brings in or hides modules": "import prelude module public meta import_private assert_exists assert_not_exists",
    "asks another program": "bv_decide bv_check polyrith native_decide",
}
REFUSED: dict[str, str] = {word: why for why, words in _COMMANDS.items() for word in words.split()}

# aesop's own rules may be called unsafe; before one of these, or a number, the word is no modifier.
_AESOP_RULES = "apply constructors cases forward destruct norm simp tactic unfold"
AESOP_RULES = frozenset(_AESOP_RULES.split())

SORRY = frozenset({"sorry", "admit", "sorryAx"})
_HASH = (
    "eval exit reduce synth guard guard_msgs guard_expr html widget sample test check_tactic check_tactic_failure check_simp check_failure"
    " lint"
    " find search help conv simp norm_num ring whnf whnfR unfold find_home import_path min_imports redundant_imports show_unused"
    " explode print_prefix compile with_exporting discr_tree_key"
)
HASH_REFUSED = frozenset(_HASH.split())
HASH_ALLOWED = frozenset({"check", "print", "adaptation_note"})

# Options that change neither what is checked nor how an answer is printed.
OPTIONS = frozenset(
    {
        "maxHeartbeats",
        "maxRecDepth",
        "synthInstance.maxHeartbeats",
        "synthInstance.maxSize",
        "autoImplicit",
        "relaxedAutoImplicit",
        "exponentiation.threshold",
        "diagnostics",
        "tactic.hygienic",
        "push_neg.use_distrib",
        "says.verify",
        "says.no_verify_in_CI",
        "quotPrecheck",
        "linter",
    }
)

# Words of a whole command: none of them can be in a statement, which is one term.
_DECLARATIONS = (
    "theorem lemma def abbrev example open namespace section end variable universe set_option include omit mutual private protected"
    " noncomputable nonrec local scoped where termination_by decreasing_by"
)
DECLARATIONS = frozenset(_DECLARATIONS.split())
