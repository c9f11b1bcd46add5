prelude
/-!
A small library for the real Lean 4.35 kernel of the tests, which comes without any .olean file. The names and types are those that Lean's
elaborator asks for; the proofs are the shortest. Enough for propositional logic, equality and arithmetic on Nat: no simp, omega, #eval, macros.
-/
set_option linter.all false
set_option genCtorIdx false
set_option genInjectivity false
set_option genSizeOf false
universe u v w

-- What the code generator refers to.
unsafe axiom lcErased : Type
unsafe axiom lcAny : Type
unsafe axiom lcVoid : Type
unsafe axiom lcProof {α : Prop} : α
unsafe axiom lcCast {α : Sort u} {β : Sort v} (a : α) : β
unsafe axiom lcUnreachable {α : Sort u} : α

-- Logic.
set_option bootstrap.inductiveCheckResultingUniverse false in
inductive PUnit : Sort u where
  | unit : PUnit
abbrev Unit : Type := PUnit
@[match_pattern] abbrev Unit.unit : Unit := PUnit.unit
inductive True : Prop where
  | intro : True
inductive False : Prop
inductive Empty : Type
def Not (a : Prop) : Prop := a → False
@[macro_inline] def False.elim {C : Sort u} (h : False) : C := h.rec
@[macro_inline] def absurd {a : Prop} {b : Sort v} (h₁ : a) (h₂ : Not a) : b := (h₂ h₁).rec
theorem trivial : True := True.intro
inductive Eq {α : Sort u} : α → α → Prop where
  | refl (a : α) : Eq a a
@[match_pattern] def rfl {α : Sort u} {a : α} : Eq a a := Eq.refl a
abbrev Eq.ndrec.{u1, u2} {α : Sort u2} {a : α} {motive : α → Sort u1} (m : motive a) {b : α} (h : Eq a b) : motive b := h.rec m
theorem Eq.subst {α : Sort u} {motive : α → Prop} {a b : α} (h₁ : Eq a b) (h₂ : motive a) : motive b := Eq.ndrec h₂ h₁
theorem Eq.symm {α : Sort u} {a b : α} (h : Eq a b) : Eq b a := h ▸ rfl
theorem Eq.trans {α : Sort u} {a b c : α} (h₁ : Eq a b) (h₂ : Eq b c) : Eq a c := h₂ ▸ h₁
@[macro_inline] def Eq.mp {α β : Sort u} (h : Eq α β) (a : α) : β := h.rec a
@[macro_inline] def Eq.mpr {α β : Sort u} (h : Eq α β) (b : β) : α := h.symm.rec b
theorem congrArg {α : Sort u} {β : Sort v} {a b : α} (f : α → β) (h : Eq a b) : Eq (f a) (f b) := h ▸ rfl
theorem congr {α : Sort u} {β : Sort v} {f g : α → β} {a b : α} (h : Eq f g) (k : Eq a b) : Eq (f a) (g b) := h ▸ k ▸ rfl
theorem congrFun {α : Sort u} {β : α → Sort v} {f g : (x : α) → β x} (h : Eq f g) (a : α) : Eq (f a) (g a) := h ▸ rfl
inductive HEq : {α : Sort u} → α → {β : Sort u} → β → Prop where
  | refl (a : α) : HEq a a
protected theorem HEq.rfl {α : Sort u} {a : α} : HEq a a := HEq.refl a
theorem eq_of_heq {α : Sort u} {a b : α} (h : HEq a b) : Eq a b :=
  have cast : (α β : Sort u) → (a : α) → (b : β) → HEq a b → (e : Eq α β) → Eq (e.rec (motive := fun T _ => T) a) b :=
    fun _ _ _ _ h => h.rec (fun _ => rfl)
  cast α α a b h rfl
theorem heq_of_eq {α : Sort u} {a b : α} (h : Eq a b) : HEq a b := h ▸ HEq.refl a
structure And (a b : Prop) : Prop where
  intro ::
  left : a
  right : b
inductive Or (a b : Prop) : Prop where
  | inl (h : a) : Or a b
  | inr (h : b) : Or a b
structure Iff (a b : Prop) : Prop where
  intro ::
  mp : a → b
  mpr : b → a
inductive Exists {α : Sort u} (p : α → Prop) : Prop where
  | intro (w : α) (h : p w) : Exists p
@[reducible] def Ne {α : Sort u} (a b : α) : Prop := Not (Eq a b)

-- Data that the elaborator builds with.
@[inline] def id {α : Sort u} (a : α) : α := a
@[inline] def Function.const {α : Sort u} (β : Sort v) (a : α) : β → α := fun _ => a
set_option checkBinderAnnotations false in
@[reducible] def inferInstance {α : Sort u} [i : α] : α := i
@[reducible] def outParam (α : Sort u) : Sort u := α
@[reducible] def optParam (α : Sort u) (default : α) : Sort u := α
inductive Bool : Type where
  | false : Bool
  | true : Bool
export Bool (false true)
structure Prod (α : Type u) (β : Type v) where
  mk :: (fst : α) (snd : β)
structure PProd (α : Sort u) (β : Sort v) where
  mk :: (fst : α) (snd : β)
structure MProd (α β : Type u) where
  mk :: (fst : α) (snd : β)
structure PULift.{r, s} (α : Sort s) : Sort (max s 1 r) where
  up :: (down : α)
structure ULift.{r, s} (α : Type s) : Type (max s r) where
  up :: (down : α)
inductive PSum (α : Sort u) (β : Sort v) where
  | inl (val : α) : PSum α β
  | inr (val : β) : PSum α β
structure Subtype {α : Sort u} (p : α → Prop) where
  val : α
  property : p val
class Inhabited (α : Sort u) where
  default : α
class inductive Nonempty (α : Sort u) : Prop where
  | intro (val : α) : Nonempty α
class inductive Decidable (p : Prop) where
  | isFalse (h : Not p) : Decidable p
  | isTrue (h : p) : Decidable p
@[inline_if_reduce, nospecialize] def Decidable.decide (p : Prop) [h : Decidable p] : Bool :=
  h.casesOn (fun _ => false) (fun _ => true)
export Decidable (isTrue isFalse decide)
abbrev DecidableEq (α : Sort u) := (a b : α) → Decidable (Eq a b)
abbrev DecidablePred {α : Sort u} (r : α → Prop) := (a : α) → Decidable (r a)
@[macro_inline] def cond {α : Sort u} (c : Bool) (x y : α) : α := match c with
  | true => x
  | false => y
theorem Bool.false_is_not_true (e : Eq false true) : False :=
  @Eq.ndrec Bool false (fun b => Bool.rec (motive := fun _ => Prop) True False b) trivial true e
theorem of_decide_eq_true {p : Prop} [inst : Decidable p] : Eq (decide p) true → p :=
  inst.rec (motive := fun i => Eq (@Decidable.decide p i) true → p) (fun _ e => (Bool.false_is_not_true e).elim) (fun h _ => h)

-- Coercions, of which elaboration asks the names.
class CoeT (α : Sort u) (_ : α) (β : Sort v) where
  coe : β
class CoeFun (α : Sort u) (γ : outParam (α → Sort v)) where
  coe : (f : α) → γ f
class CoeSort (α : Sort u) (β : outParam (Sort v)) where
  coe : α → β

-- Numbers.
inductive Nat where
  | zero : Nat
  | succ (n : Nat) : Nat
class OfNat (α : Type u) (_ : Nat) where
  ofNat : α
@[default_instance 100] instance instOfNatNat (n : Nat) : OfNat Nat n := ⟨n⟩
class HAdd (α : Type u) (β : Type v) (γ : outParam (Type w)) where
  hAdd : α → β → γ
class HSub (α : Type u) (β : Type v) (γ : outParam (Type w)) where
  hSub : α → β → γ
class HMul (α : Type u) (β : Type v) (γ : outParam (Type w)) where
  hMul : α → β → γ
class HPow (α : Type u) (β : Type v) (γ : outParam (Type w)) where
  hPow : α → β → γ
class Add (α : Type u) where
  add : α → α → α
class Sub (α : Type u) where
  sub : α → α → α
class Mul (α : Type u) where
  mul : α → α → α
class Pow (α : Type u) (β : Type v) where
  pow : α → β → α
class LT (α : Type u) where
  lt : α → α → Prop
class LE (α : Type u) where
  le : α → α → Prop
@[reducible] def GT.gt {α : Type u} [LT α] (a b : α) : Prop := LT.lt b a
@[reducible] def GE.ge {α : Type u} [LE α] (a b : α) : Prop := LE.le b a
@[default_instance] instance instHAdd {α : Type u} [Add α] : HAdd α α α := ⟨Add.add⟩
@[default_instance] instance instHSub {α : Type u} [Sub α] : HSub α α α := ⟨Sub.sub⟩
@[default_instance] instance instHMul {α : Type u} [Mul α] : HMul α α α := ⟨Mul.mul⟩
@[default_instance] instance instHPow {α : Type u} {β : Type v} [Pow α β] : HPow α β α := ⟨Pow.pow⟩
noncomputable section
@[extern "lean_nat_add"] def Nat.add (n m : Nat) : Nat := Nat.rec (motive := fun _ => Nat) n (fun _ r => Nat.succ r) m
@[extern "lean_nat_mul"] def Nat.mul (n m : Nat) : Nat := Nat.rec (motive := fun _ => Nat) Nat.zero (fun _ r => Nat.add r n) m
@[extern "lean_nat_pow"] def Nat.pow (n m : Nat) : Nat := Nat.rec (motive := fun _ => Nat) (Nat.succ Nat.zero) (fun _ r => Nat.mul r n) m
@[extern "lean_nat_pred"] def Nat.pred (n : Nat) : Nat := Nat.rec (motive := fun _ => Nat) Nat.zero (fun k _ => k) n
@[extern "lean_nat_sub"] def Nat.sub (n m : Nat) : Nat := Nat.rec (motive := fun _ => Nat) n (fun _ r => Nat.pred r) m
@[extern "lean_nat_dec_eq"] def Nat.beq (n : Nat) : Nat → Bool :=
  Nat.rec (motive := fun _ => Nat → Bool) (fun m => Nat.rec (motive := fun _ => Bool) true (fun _ _ => false) m)
    (fun _ r m => Nat.rec (motive := fun _ => Bool) false (fun k _ => r k) m) n
@[extern "lean_nat_dec_le"] def Nat.ble (n : Nat) : Nat → Bool :=
  Nat.rec (motive := fun _ => Nat → Bool) (fun _ => true)
    (fun _ r m => Nat.rec (motive := fun _ => Bool) false (fun k _ => r k) m) n
end
inductive Nat.le (n : Nat) : Nat → Prop where
  | refl : Nat.le n n
  | step {m : Nat} : Nat.le n m → Nat.le n (Nat.succ m)
noncomputable instance instAddNat : Add Nat := ⟨Nat.add⟩
noncomputable instance instSubNat : Sub Nat := ⟨Nat.sub⟩
noncomputable instance instMulNat : Mul Nat := ⟨Nat.mul⟩
noncomputable instance instPowNat : Pow Nat Nat := ⟨Nat.pow⟩
instance instLENat : LE Nat := ⟨Nat.le⟩
instance instLTNat : LT Nat := ⟨fun n m => Nat.le (Nat.succ n) m⟩
theorem Nat.eq_of_beq (n : Nat) : (m : Nat) → Eq (Nat.beq n m) true → Eq n m :=
  Nat.rec (motive := fun n => (m : Nat) → Eq (Nat.beq n m) true → Eq n m)
    (fun m => Nat.rec (motive := fun m => Eq (Nat.beq Nat.zero m) true → Eq Nat.zero m)
      (fun _ => rfl) (fun _ _ e => (Bool.false_is_not_true e).elim) m)
    (fun n ih m => Nat.rec (motive := fun m => Eq (Nat.beq (Nat.succ n) m) true → Eq (Nat.succ n) m)
      (fun e => (Bool.false_is_not_true e).elim) (fun m _ e => congrArg Nat.succ (ih m e)) m) n
theorem Nat.beq_self (n : Nat) : Eq (Nat.beq n n) true :=
  Nat.rec (motive := fun n => Eq (Nat.beq n n) true) rfl (fun _ ih => ih) n
noncomputable instance instDecidableEqNat : DecidableEq Nat := fun n m =>
  Bool.rec (motive := fun b => Eq (Nat.beq n m) b → Decidable (Eq n m))
    (fun e => isFalse (fun h => Bool.false_is_not_true (e.symm.trans (Eq.ndrec (motive := fun k => Eq (Nat.beq n k) true) (Nat.beq_self n) h))))
    (fun e => isTrue (Nat.eq_of_beq n m e)) (Nat.beq n m) rfl
theorem Nat.add_zero (n : Nat) : Eq (HAdd.hAdd n (0 : Nat)) n := rfl
theorem Nat.add_succ (n m : Nat) : Eq (HAdd.hAdd n (Nat.succ m)) (Nat.succ (HAdd.hAdd n m)) := rfl
theorem Nat.zero_add (n : Nat) : Eq (HAdd.hAdd (0 : Nat) n) n :=
  Nat.rec (motive := fun n => Eq (HAdd.hAdd (0 : Nat) n) n) (@rfl Nat Nat.zero) (fun _ ih => congrArg Nat.succ ih) n
theorem Nat.succ_add (n m : Nat) : Eq (HAdd.hAdd (Nat.succ n) m) (Nat.succ (HAdd.hAdd n m)) :=
  Nat.rec (motive := fun m => Eq (HAdd.hAdd (Nat.succ n) m) (Nat.succ (HAdd.hAdd n m))) rfl (fun _ ih => congrArg Nat.succ ih) m
theorem Nat.add_comm (n m : Nat) : Eq (HAdd.hAdd n m) (HAdd.hAdd m n) :=
  Nat.rec (motive := fun m => Eq (HAdd.hAdd n m) (HAdd.hAdd m n)) (Nat.zero_add n).symm
    (fun m ih => (congrArg Nat.succ ih).trans (Nat.succ_add m n).symm) m
theorem Nat.add_assoc (n m k : Nat) : Eq (HAdd.hAdd (HAdd.hAdd n m) k) (HAdd.hAdd n (HAdd.hAdd m k)) :=
  Nat.rec (motive := fun k => Eq (HAdd.hAdd (HAdd.hAdd n m) k) (HAdd.hAdd n (HAdd.hAdd m k))) rfl (fun _ ih => congrArg Nat.succ ih) k

-- What sorry, quotients and the standard axioms are.
axiom String : Type
inductive Lean.Name where
  | anonymous : Lean.Name
  | str (pre : Lean.Name) (s : String)
  | num (pre : Lean.Name) (i : Nat)
axiom sorryAx (α : Sort u) (synthetic : Bool) : α
axiom propext {a b : Prop} : (Iff a b) → Eq a b
axiom Classical.choice {α : Sort u} : Nonempty α → α
init_quot
axiom Quot.sound {α : Sort u} {r : α → α → Prop} {a b : α} : r a b → Eq (Quot.mk r a) (Quot.mk r b)
