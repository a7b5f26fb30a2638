//! What a constraint, and what stands in front of a program, do to it, written out as operations of the program.

use trellis_programs::{Comparison, Definition, End, Kind, Operation, Value};

use super::{Program, ProgramId, check, history};

impl Program {
    /// A program that draws by itself what this one draws where only some tokens may be drawn: it asks for the constraint's
    /// mask, and its caller need not apply it. For devices, which take programs as they are written.
    ///
    /// Every row that is drawn from is −∞ outside of the mask, and so are the logits, of other members too, where the program
    /// does not ask for the mask; a token that comes from elsewhere is drawn from a row that has it alone. It may be longer
    /// than a program may be, and costs what this one does.
    #[must_use]
    pub fn constrained(&self) -> Self {
        if self.keeps_to_constraint { self.clone() } else { self.rewritten(None) }
    }

    /// This program where the row in which `front` ends is what it has for the logits, its own and those of the first
    /// `n_members` other members of its mixture; another member has those of the first. What is −∞ in that row counts as
    /// what the constraint does not allow. It is [`constrained`](Self::constrained) as well.
    ///
    /// `front` is one that [`Operator`](crate::sampling::Operator) takes.
    pub(in crate::sampling) fn behind(&self, front: &Self, n_members: usize) -> Self {
        self.rewritten(Some((front, n_members)))
    }

    fn rewritten(&self, front: Option<(&Self, usize)>) -> Self {
        let mut writer = Writer::default();
        let given = writer.push(Operation::Constraint, Kind::Set);
        let nothing = writer.push(Operation::Constant(f32::NEG_INFINITY), Kind::Number);
        let (constraint, first) = match front {
            None => (given, None),
            Some((front, _)) => {
                let row = writer.front(front, Operation::Logits);
                let above = Operation::Compare(Comparison::Greater, row, nothing);
                let above = writer.push(above, Kind::Set);
                (writer.push(Operation::And(given, above), Kind::Set), Some(row))
            }
        };
        let only = |row| Operation::Select(constraint, row, nothing);
        let sees_all = self.asks_for_constraint();
        let mut n_fronts = 1;
        let mut places: Vec<Value> = Vec::with_capacity(self.kinds.len());
        let place = |places: &[Value], value: Value| places[usize::from(value.0)];
        for (operation, &kind) in self.definition.operations.iter().zip(&self.kinds) {
            let mut operation = operation.renamed(|value| place(&places, value));
            if let Operation::Argmax(row) | Operation::Draw(row, _) = &mut operation {
                *row = writer.push(only(*row), Kind::Row);
            }
            let is_read = matches!(operation, Operation::Logits | Operation::Member(_));
            let value = match (operation, front, first) {
                (Operation::Constraint, ..) => constraint,
                (Operation::Logits, _, Some(row)) => row,
                (Operation::Member(idx), Some((_, n_members)), Some(row))
                    if usize::from(idx) >= n_members =>
                {
                    row
                }
                (Operation::Member(idx), Some((front, _)), _) => {
                    n_fronts += 1;
                    writer.front(front, Operation::Member(idx))
                }
                (operation, ..) => writer.push(operation, kind),
            };
            places.push(if is_read && !sees_all { writer.push(only(value), Kind::Row) } else { value });
        }
        let end = place(&places, self.definition.end.value());
        let last = &writer.operations[usize::from(end.0)];
        let is_drawn = matches!(last, Operation::Argmax(_) | Operation::Draw(..));
        let end = match self.definition.end {
            End::Row(_) if front.is_some() => End::Row(writer.push(only(end), Kind::Row)),
            End::Row(_) => End::Row(end),
            End::Token(_) if is_drawn => End::Token(end),
            End::Token(_) => {
                let itself = writer.push(Operation::Only(end), Kind::Set);
                let allowed = writer.push(Operation::And(itself, constraint), Kind::Set);
                let zero = writer.push(Operation::Constant(0.0), Kind::Number);
                let row = writer.push(Operation::Select(allowed, zero, nothing), Kind::Row);
                End::Token(writer.push(Operation::Argmax(row), Kind::Token))
            }
        };
        let renamed = |values: &[Value]| values.iter().map(|&value| place(&places, value)).collect();
        let definition = Definition {
            operations: writer.operations,
            end,
            first_state: self.definition.first_state.clone(),
            next_state: renamed(&self.definition.next_state),
            reports: renamed(&self.definition.reports),
        };
        let is_needed = check::needed(&definition);
        Self {
            id: ProgramId::of(&definition),
            shape: self.shape,
            kinds: writer.kinds,
            last_uses: check::last_uses(&definition, &is_needed),
            is_needed,
            cost: self.cost + front.map_or(0.0, |(front, _)| front.cost * n_fronts as f32),
            n_history: history::n_tokens(&definition, self.shape.n_positions),
            keeps_to_constraint: true,
            definition,
        }
    }
}

/// Operations being written, each with what it makes.
#[derive(Default)]
struct Writer {
    operations: Vec<Operation>,
    kinds: Vec<Kind>,
}

impl Writer {
    /// The operations of what stands in front, over this row of logits; returns the row in which it ends.
    fn front(&mut self, front: &Program, logits: Operation) -> Value {
        let mut places: Vec<Value> = Vec::with_capacity(front.kinds.len());
        for (operation, &kind) in front.definition.operations.iter().zip(&front.kinds) {
            let operation = match *operation {
                Operation::Logits => logits,
                ref other => other.renamed(|value| places[usize::from(value.0)]),
            };
            places.push(self.push(operation, kind));
        }
        places[usize::from(front.definition.end.value().0)]
    }

    /// The value of an operation, which is written once: so few are new that their places fit, as the limits of
    /// [`Operator`](crate::sampling::Operator) say.
    fn push(&mut self, operation: Operation, kind: Kind) -> Value {
        let is_same = |known: &Operation| match (known, &operation) {
            // 0 and −0 are equal and not the same.
            (Operation::Constant(a), Operation::Constant(b)) => a.to_bits() == b.to_bits(),
            (a, b) => a == b,
        };
        let known = self.operations.iter().position(is_same);
        let idx = known.unwrap_or_else(|| {
            self.operations.push(operation);
            self.kinds.push(kind);
            self.operations.len() - 1
        });
        Value(u8::try_from(idx).expect("a program has at most 128 operations, and each row is masked once"))
    }
}
