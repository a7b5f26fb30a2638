//! Plain roots: what is gathered from a row that a few operations in a fixed order make of the logits.
//!
//! Samplers are mostly made of such. The kernel goes through them without registers and without looking for operands:
//! moved by a number, divided, moved, marked, moved again, made positive, made negative, and kept where a bound or a nucleus
//! says so, each or not.

use super::program_code::{Code, Element, Entry, Root, Taken};
use super::program_plan::{NO_NUMBER, ONE};

/// Entries of all plain roots of a reading: with the longest code and all roots they fit into what a step may have.
pub(super) const N_PLAIN_MAX: usize = 28;
/// Entries of one.
const N_ENTRIES: usize = 2;

const MOVED_FIRST: u32 = 1 << 0;
const MOVED_FIRST_DOWN: u32 = 1 << 1;
const DIVIDED: u32 = 1 << 2;
const MOVED: u32 = 1 << 3;
const MOVED_DOWN: u32 = 1 << 4;
const MARKED: u32 = 1 << 5;
const MOVED_AGAIN: u32 = 1 << 6;
const MOVED_AGAIN_DOWN: u32 = 1 << 7;
const POSITIVE: u32 = 1 << 8;
const NEGATIVE: u32 = 1 << 9;
const KEPT_FROM: u32 = 1 << 10;
const KEPT_ABOVE: u32 = 1 << 11;
const IN_SET: u32 = 1 << 12;
const IN_NUCLEUS: u32 = 1 << 13;
/// What a nucleus keeps, where it is not the row that it goes by: the logits, or the marked row.
const OF_LOGITS: u32 = 1 << 14;
const OF_MARKED: u32 = 1 << 15;

/// What the kernel's source is told of forms.
pub(super) const FORMS: [(&str, u32); 17] = [
    ("N_PLAIN_ENTRIES", N_ENTRIES as u32),
    ("MOVED_FIRST", MOVED_FIRST),
    ("MOVED_FIRST_DOWN", MOVED_FIRST_DOWN),
    ("DIVIDED", DIVIDED),
    ("MOVED", MOVED),
    ("MOVED_DOWN", MOVED_DOWN),
    ("MARKED", MARKED),
    ("MOVED_AGAIN", MOVED_AGAIN),
    ("MOVED_AGAIN_DOWN", MOVED_AGAIN_DOWN),
    ("POSITIVE", POSITIVE),
    ("NEGATIVE", NEGATIVE),
    ("KEPT_FROM", KEPT_FROM),
    ("KEPT_ABOVE", KEPT_ABOVE),
    ("IN_SET", IN_SET),
    ("IN_NUCLEUS", IN_NUCLEUS),
    ("OF_LOGITS", OF_LOGITS),
    ("OF_MARKED", OF_MARKED),
];

/// How a row is made of the logits: what is done, and the numbers with which.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Form {
    flags: u32,
    divisor: u8,
    /// First, before the mark, and after it.
    by: [u8; 3],
    bound: u8,
    elsewhere: u8,
}

impl Form {
    /// Does one more thing, if what is done comes before it.
    fn then(self, flag: u32) -> Option<Self> {
        (self.flags < flag).then_some(Self { flags: self.flags | flag, ..self })
    }

    fn then_divided(self, divisor: u8) -> Option<Self> {
        let Self { flags, by: [_, by, again], .. } = self;
        let before = match flags & !MOVED_DOWN {
            0 => self,
            // It was moved before it is divided.
            MOVED => {
                let down = if flags & MOVED_DOWN != 0 { MOVED_FIRST_DOWN } else { 0 };
                Self { flags: MOVED_FIRST | down, by: [by, 0, again], ..self }
            }
            _ => return None,
        };
        Some(Self { divisor, ..before.then(DIVIDED)? })
    }

    fn then_moved(self, number: u8, is_down: bool) -> Option<Self> {
        let (place, flag, down) =
            if self.flags < MOVED { (1, MOVED, MOVED_DOWN) } else { (2, MOVED_AGAIN, MOVED_AGAIN_DOWN) };
        let mut moved = self.then(flag)?;
        moved.by[place] = number;
        moved.flags |= if is_down { down } else { 0 };
        Some(moved)
    }

    fn entry(self) -> Entry {
        let [first, by, again] = self.by;
        let ends = u32::from(self.bound) | u32::from(self.elsewhere) << 8;
        Entry([self.flags, u32::from_le_bytes([self.divisor, first, by, again]), ends, 0])
    }
}

/// The entries of a root, if it is plain. The first: (code | slot, 0, source of a draw, number that the code says).
pub(super) fn plain(elements: &[Option<Element>], root: &Root) -> Option<[Entry; N_ENTRIES]> {
    let [x, set, last] = root.operands;
    let Taken::Row(row) = x else { return None };
    let form = match (root.code, set) {
        (Code::Rank, Taken::Row(of)) => marked(elements, of, row)?,
        (Code::Draw, Taken::Immediate(_)) | (Code::Count, _) => form(elements, row)?,
        (Code::Best | Code::Sum | Code::Squares | Code::LogSumExp | Code::Entropy, Taken::Number(ONE)) => {
            form(elements, row)?
        }
        _ => return None,
    };
    let word = |taken: Taken| match taken {
        Taken::Immediate(word) => word,
        Taken::Number(number) => u32::from(number),
        Taken::Row(_) => 0,
    };
    let head = Entry([root.code as u32 | u32::from(root.result) << 8, 0, word(set), word(last)]);
    Some([head, form.entry()])
}

/// How a row is made.
fn form(elements: &[Option<Element>], row: u8) -> Option<Form> {
    let Element { code, operands: [mut x, mut y, z] } = elements[usize::from(row)]?;
    if code == Code::Logits {
        return Some(Form::default());
    }
    if code == Code::Add && matches!(x, Taken::Number(_)) {
        std::mem::swap(&mut x, &mut y);
    }
    let Taken::Row(from) = x else { return None };
    if code == Code::Select {
        return kept_by_nucleus(elements, from, y, z);
    }
    let before = form(elements, from)?;
    let number = match y {
        Taken::Number(number) => number,
        Taken::Immediate(_) if matches!(code, Code::Abs | Code::Neg) => NO_NUMBER,
        _ => return None,
    };
    let bounded = |flag| {
        let kept = before.then(flag).filter(|_| before.flags < KEPT_FROM)?;
        Some(Form { bound: number, elsewhere: NO_NUMBER, ..kept })
    };
    match code {
        Code::Div => before.then_divided(number),
        Code::Add => before.then_moved(number, false),
        Code::Sub => before.then_moved(number, true),
        Code::Abs => before.then(POSITIVE),
        Code::Neg => before.then(NEGATIVE),
        Code::IfGreaterEqual => bounded(KEPT_FROM),
        Code::IfGreater => bounded(KEPT_ABOVE),
        Code::KeepLargest => bounded(IN_SET),
        Code::IfNucleus => bounded(IN_NUCLEUS),
        _ => None,
    }
}

/// A row where a nucleus says so, whose order goes on from the row that it is of.
fn kept_by_nucleus(elements: &[Option<Element>], set: u8, kept: Taken, elsewhere: Taken) -> Option<Form> {
    let (Taken::Row(kept), Taken::Number(elsewhere)) = (kept, elsewhere) else { return None };
    let Element {
        code: Code::KeepNucleus,
        operands: [Taken::Row(order), Taken::Row(of), Taken::Number(bound)],
    } = elements[usize::from(set)]?
    else {
        return None;
    };
    let value = match elements[usize::from(kept)]?.code {
        Code::Logits => OF_LOGITS,
        _ if kept == of => OF_MARKED,
        _ => return None,
    };
    let made = marked(elements, of, order)?;
    Some(Form { flags: made.flags | IN_NUCLEUS | value, bound, elsewhere, ..made })
}

/// How `row` is made, with `of` marked on the way; without a mark the logits are marked.
fn marked(elements: &[Option<Element>], of: u8, row: u8) -> Option<Form> {
    let (before, made) = (form(elements, of)?, form(elements, row)?);
    // A row that is kept in part marks one of its own.
    if made.flags >= KEPT_FROM {
        return None;
    }
    if before.flags == 0 {
        return Some(made);
    }
    let is_before = made.flags & (MARKED - 1) == before.flags
        && (made.divisor, made.by[0], made.by[1]) == (before.divisor, before.by[0], before.by[1]);
    is_before.then_some(Form { flags: made.flags | MARKED, ..made })
}
