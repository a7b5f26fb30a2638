//! What a program has to keep to.

use trellis_programs::{BiasId, Definition, End, Kind, MaskId, Operation, Source, Value};

use super::{
    DEPTH_MAX, N_ALIVE_MAX, N_APART_MAX, N_HANDLES_MAX, N_MEMBERS_MAX, N_OPERATIONS_MAX, N_PARAMETERS_MAX,
    N_REPORTS_MAX, N_STATE_MAX, ProgramError,
};

/// The most tokens whose hash keys noise, and the longest run of [`Operation::Ngrams`].
const N_TOKENS_MAX: u8 = 16;

/// Checks the operations one by one; returns what each makes.
pub(super) fn kinds(definition: &Definition) -> Result<Vec<Kind>, ProgramError> {
    let Definition { operations, end, first_state, next_state, reports } = definition;
    for (what, n, max) in [
        ("operations", operations.len(), N_OPERATIONS_MAX),
        ("numbers of state", first_state.len(), N_STATE_MAX),
        ("reports", reports.len(), N_REPORTS_MAX),
    ] {
        if n > max {
            return Err(ProgramError::TooMany { what, n, max });
        }
    }
    if first_state.len() != next_state.len() {
        return Err(ProgramError::StateLength { n_first: first_state.len(), n_next: next_state.len() });
    }
    let mut kinds = Vec::with_capacity(operations.len());
    for (idx, operation) in operations.iter().enumerate() {
        numbers(idx, operation, first_state.len())?;
        let kind = Operands { idx, operation, kinds: &kinds }.kind()?;
        kinds.push(kind);
    }
    for &first in first_state {
        if !first.is_finite() {
            let (idx, operation, argument) = (operations.len(), "state", "the first value");
            let expected = "a finite number";
            return Err(ProgramError::OutOfRange {
                idx,
                operation,
                argument,
                value: f64::from(first),
                expected,
            });
        }
    }
    let of_kind = |what, value: Value, kind: Kind, expected| match kinds.get(usize::from(value.0)) {
        Some(&found) if found == kind => Ok(()),
        _ => Err(ProgramError::WrongEnd { what, operand: usize::from(value.0), expected }),
    };
    match *end {
        End::Token(value) => of_kind("end", value, Kind::Token, "a token")?,
        End::Row(value) => of_kind("end", value, Kind::Row, "a row")?,
    }
    for &value in next_state {
        of_kind("state", value, Kind::Number, "a number")?;
    }
    for &value in reports {
        of_kind("report", value, Kind::Number, "a number")?;
    }
    let of_history = |operation: &&Operation| {
        matches!(
            operation,
            Operation::Repeats { .. }
                | Operation::Ngrams { .. }
                | Operation::CountLast { .. }
                | Operation::CountSince(_)
        )
    };
    let of_member = |operation: &&Operation| matches!(operation, Operation::Member(_));
    for (what, n) in [
        ("operations over the history", operations.iter().filter(of_history).count()),
        ("operations over members", operations.iter().filter(of_member).count()),
    ] {
        if n > N_APART_MAX {
            return Err(ProgramError::TooMany { what, n, max: N_APART_MAX });
        }
    }
    Ok(kinds)
}

/// Checks what an operation says besides its operands.
fn numbers(idx: usize, operation: &Operation, n_state: usize) -> Result<(), ProgramError> {
    let check = |holds: bool, argument, value: f64, expected| match holds {
        true => Ok(()),
        false => {
            let operation = operation.name();
            Err(ProgramError::OutOfRange { idx, operation, argument, value, expected })
        }
    };
    let handle = |argument, id: u8| {
        check(usize::from(id) < N_HANDLES_MAX, argument, f64::from(id), "a number below 16")
    };
    let source = |source: &Source| match *source {
        Source::Seed { .. } => Ok(()),
        Source::Key { n_tokens, .. } => {
            check(n_tokens <= N_TOKENS_MAX, "n-tokens", f64::from(n_tokens), "at most 16")
        }
    };
    match operation {
        Operation::Constant(x) => {
            check(x.is_finite() || *x == f32::NEG_INFINITY, "the number", f64::from(*x), "a number or -inf")
        }
        Operation::Parameter(id) | Operation::ParameterToken(id) => {
            check(usize::from(*id) < N_PARAMETERS_MAX, "the parameter", f64::from(*id), "a number below 16")
        }
        Operation::State(id) => check(
            usize::from(*id) < n_state,
            "the number of state",
            f64::from(*id),
            "one that the program has",
        ),
        Operation::Mask(MaskId(id)) => handle("the mask", *id),
        Operation::Bias(BiasId(id)) => handle("the bias", *id),
        Operation::Repeats { window, cap, breakers } => {
            check(*window > 0, "window", 0.0, "at least 1")?;
            check((1..=1024).contains(cap), "cap", f64::from(*cap), "1 to 1024")?;
            breakers.map_or(Ok(()), |MaskId(id)| handle("the mask of breakers", id))
        }
        Operation::Ngrams { n, .. } => check((1..=N_TOKENS_MAX).contains(n), "n", f64::from(*n), "1 to 16"),
        Operation::NoiseRow { source: from, .. } | Operation::Uniform(from) | Operation::Draw(_, from) => {
            source(from)
        }
        Operation::Member(id) => {
            check(usize::from(*id) < N_MEMBERS_MAX, "the member", f64::from(*id), "a number below 8")
        }
        _ => Ok(()),
    }
}

/// An operation with the kinds of the values before it.
struct Operands<'a> {
    idx: usize,
    operation: &'a Operation,
    kinds: &'a [Kind],
}

impl Operands<'_> {
    fn kind_of(&self, value: Value) -> Result<Kind, ProgramError> {
        let operand = usize::from(value.0);
        let (idx, operation) = (self.idx, self.operation.name());
        self.kinds.get(operand).copied().ok_or(ProgramError::NotMadeBefore { idx, operation, operand })
    }

    /// Checks that a value is of one of these kinds.
    fn one_of(&self, value: Value, kinds: &[Kind], expected: &'static str) -> Result<Kind, ProgramError> {
        let found = self.kind_of(value)?;
        if kinds.contains(&found) {
            return Ok(found);
        }
        let (idx, operation, operand) = (self.idx, self.operation.name(), usize::from(value.0));
        Err(ProgramError::WrongKind { idx, operation, operand, expected, found })
    }

    fn numeric(&self, value: Value) -> Result<Kind, ProgramError> {
        self.one_of(value, &[Kind::Row, Kind::Number], "a row or a number")
    }

    fn row(&self, value: Value) -> Result<(), ProgramError> {
        self.one_of(value, &[Kind::Row], "a row").map(drop)
    }

    fn set(&self, value: Value) -> Result<(), ProgramError> {
        self.one_of(value, &[Kind::Set], "a set").map(drop)
    }

    fn number(&self, value: Value) -> Result<(), ProgramError> {
        self.one_of(value, &[Kind::Number], "a number").map(drop)
    }

    fn token(&self, value: Value) -> Result<(), ProgramError> {
        self.one_of(value, &[Kind::Token], "a token").map(drop)
    }

    /// A row if either is one.
    fn wider(&self, x: Value, y: Value) -> Result<Kind, ProgramError> {
        Ok(match (self.numeric(x)?, self.numeric(y)?) {
            (Kind::Number, Kind::Number) => Kind::Number,
            _ => Kind::Row,
        })
    }

    fn kind(&self) -> Result<Kind, ProgramError> {
        Ok(match *self.operation {
            Operation::Logits
            | Operation::Member(_)
            | Operation::CountLast { .. }
            | Operation::Repeats { .. }
            | Operation::Bias(_)
            | Operation::NoiseRow { .. } => Kind::Row,
            Operation::LogSoftmax(x) => {
                self.row(x)?;
                Kind::Row
            }
            Operation::CountSince(x) => {
                self.number(x)?;
                Kind::Row
            }
            Operation::Unary(_, x) => self.numeric(x)?,
            Operation::Binary(_, x, y) => self.wider(x, y)?,
            Operation::Compare(_, x, y) => match self.wider(x, y)? {
                Kind::Row => Kind::Set,
                kind => kind,
            },
            Operation::And(x, y) | Operation::Or(x, y) => {
                self.set(x)?;
                self.set(y)?;
                Kind::Set
            }
            Operation::Not(x) => {
                self.set(x)?;
                Kind::Set
            }
            Operation::Mask(_)
            | Operation::Constraint
            | Operation::Ngrams { .. }
            | Operation::All
            | Operation::Nothing => Kind::Set,
            Operation::Largest { row, k } => {
                self.row(row)?;
                self.number(k)?;
                Kind::Set
            }
            Operation::Nucleus { order, row, p } => {
                self.row(order)?;
                self.row(row)?;
                self.number(p)?;
                Kind::Set
            }
            Operation::Only(x) => {
                self.token(x)?;
                Kind::Set
            }
            Operation::Constant(_)
            | Operation::Parameter(_)
            | Operation::State(_)
            | Operation::Position
            | Operation::Length
            | Operation::Drawn
            | Operation::Uniform(_) => Kind::Number,
            Operation::Reduce(_, row, over) => {
                self.row(row)?;
                self.set(over)?;
                Kind::Number
            }
            Operation::Count(set) => {
                self.set(set)?;
                Kind::Number
            }
            Operation::At(row, token) => {
                self.row(row)?;
                self.token(token)?;
                Kind::Number
            }
            Operation::Argmax(row) | Operation::Draw(row, _) => {
                self.row(row)?;
                Kind::Token
            }
            Operation::ParameterToken(_) => Kind::Token,
            Operation::Select(condition, yes, no) => self.select(condition, yes, no)?,
        })
    }

    fn select(&self, condition: Value, yes: Value, no: Value) -> Result<Kind, ProgramError> {
        let condition = self.one_of(condition, &[Kind::Set, Kind::Number], "a set or a number")?;
        let numeric = |kind| matches!(kind, Kind::Row | Kind::Number);
        let (yes_kind, no_kind) = (self.kind_of(yes)?, self.kind_of(no)?);
        match (condition, yes_kind, no_kind) {
            (Kind::Set, yes, no) if numeric(yes) && numeric(no) => Ok(Kind::Row),
            (Kind::Number, Kind::Number, Kind::Number) => Ok(Kind::Number),
            (Kind::Number, yes, no) if numeric(yes) && numeric(no) => Ok(Kind::Row),
            (_, Kind::Set, Kind::Set) => Ok(Kind::Set),
            (Kind::Number, Kind::Token, Kind::Token) => Ok(Kind::Token),
            (Kind::Set, Kind::Token, _) => self.one_of(yes, &[], "a row, a number or a set"),
            (Kind::Set, _, Kind::Token) => self.one_of(no, &[], "a row, a number or a set"),
            _ => self.one_of(no, &[], "of the kind of the value that is taken otherwise"),
        }
    }
}

/// How many reductions have to be made one after the other before each value is known.
pub(super) fn depths(definition: &Definition, kinds: &[Kind]) -> Vec<usize> {
    let mut depths: Vec<usize> = Vec::with_capacity(kinds.len());
    for operation in &definition.operations {
        let of_operands = operation.operands().map(|value| depths[usize::from(value.0)]).max().unwrap_or(0);
        depths.push(of_operands + usize::from(is_reduction(operation)));
    }
    depths
}

/// Whether the whole row has to be looked at before the value is known.
pub(super) fn is_reduction(operation: &Operation) -> bool {
    matches!(
        operation,
        Operation::LogSoftmax(_)
            | Operation::Reduce(..)
            | Operation::Count(_)
            | Operation::Largest { .. }
            | Operation::Nucleus { .. }
            | Operation::Argmax(_)
            | Operation::Draw(..)
    )
}

/// Checks that no value is too many reductions away.
pub(super) fn depth(definition: &Definition, kinds: &[Kind]) -> Result<(), ProgramError> {
    let depths = depths(definition, kinds);
    match depths.iter().position(|&depth| depth > DEPTH_MAX) {
        Some(idx) => {
            let operation = definition.operations[idx].name();
            Err(ProgramError::TooDeep { idx, operation, depth: depths[idx], max: DEPTH_MAX })
        }
        None => Ok(()),
    }
}

/// The values that a program gives, and those that they need. A draw is needed in any case: it may fail.
pub(super) fn needed(definition: &Definition) -> Vec<bool> {
    let Definition { operations, end, next_state, reports, .. } = definition;
    let mut is_needed: Vec<bool> = operations
        .iter()
        .map(|operation| matches!(operation, Operation::Draw(..) | Operation::Argmax(_)))
        .collect();
    for value in next_state.iter().chain(reports).copied().chain([end.value()]) {
        is_needed[usize::from(value.0)] = true;
    }
    for idx in (0..operations.len()).rev() {
        if is_needed[idx] {
            operations[idx].operands().for_each(|operand| is_needed[usize::from(operand.0)] = true);
        }
    }
    is_needed
}

/// For each value, the operation after which it is not needed any more; what the program gives is needed to its end.
pub(super) fn last_uses(definition: &Definition, is_needed: &[bool]) -> Vec<usize> {
    let Definition { operations, end, next_state, reports, .. } = definition;
    let mut last_uses: Vec<usize> = (0..operations.len()).collect();
    for (idx, operation) in operations.iter().enumerate().filter(|&(idx, _)| is_needed[idx]) {
        for operand in operation.operands() {
            last_uses[usize::from(operand.0)] = idx;
        }
    }
    for value in next_state.iter().chain(reports).copied().chain([end.value()]) {
        last_uses[usize::from(value.0)] = operations.len();
    }
    last_uses
}

/// Checks that few rows and sets are alive at once: a device has registers for so many.
pub(super) fn alive(
    definition: &Definition,
    kinds: &[Kind],
    is_needed: &[bool],
    last_uses: &[usize],
) -> Result<(), ProgramError> {
    let mut ends = vec![0usize; definition.operations.len() + 1];
    let mut n_alive = 0;
    for (idx, operation) in definition.operations.iter().enumerate() {
        // All tokens, and none, are no row to hold.
        let is_held = matches!(kinds[idx], Kind::Row | Kind::Set)
            && !matches!(operation, Operation::All | Operation::Nothing | Operation::Logits);
        if is_needed[idx] && is_held {
            n_alive += 1;
            ends[last_uses[idx]] += 1;
        }
        if n_alive > N_ALIVE_MAX {
            let (what, max) = ("rows and sets that are alive at once", N_ALIVE_MAX);
            return Err(ProgramError::TooMany { what, n: n_alive, max });
        }
        n_alive -= ends[idx];
    }
    Ok(())
}
