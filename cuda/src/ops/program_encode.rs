//! A plan as a list of entries: the header, steps, sources of noise, code.

use trellis_programs::Source;

use super::program_code::{Code, Element, Entry, N_REGISTERS, Root, Taken, TooLarge, code, source_entry};
use super::program_plain::{N_PLAIN_MAX, plain};
use super::program_plan::{EncodedProgram, N_GATHERED, N_HEADER, N_SUMS, NO_NUMBER, PlanError};
use super::program_small::SmallCode;

/// What is gathered, and where it goes.
#[derive(Clone, Copy)]
pub(super) struct Gather {
    pub(super) pass: usize,
    pub(super) root: Root,
    /// The selection outside of whose set there is nothing to gather, by its value.
    pub(super) within: Option<u8>,
}

/// The bound of a selection.
#[derive(Clone, Copy)]
pub(super) struct Selection {
    pub(super) pass: usize,
    /// Of the operation that selects.
    pub(super) value: u8,
    pub(super) code: Code,
    pub(super) order: Taken,
    pub(super) row: Taken,
    /// A bound on the order, near its largest: bins are counted from it.
    pub(super) largest_order: u8,
    pub(super) largest_row: u8,
    pub(super) argument: u8,
    pub(super) bound: u8,
    /// As in [`Gather`].
    pub(super) within: Option<u8>,
}

/// An operation over numbers.
#[derive(Clone, Copy)]
pub(super) enum Scalar {
    /// Of nothing but the place of the draw.
    Given(Entry),
    Instruction(Entry),
    /// The value of a row at a token.
    Take {
        result: u8,
        row: Taken,
        token: u8,
    },
}

/// In a step, that it may look at nothing but the list of the last selection.
pub(super) const WITHIN_LIST: u32 = 1 << 8;
/// In a step, the bits from here on: entries of its code that are plain roots, which come first.
pub(super) const N_PLAIN_SHIFT: u32 = 16;
/// In the header, behind the number of steps: entries of code for the kernels of small programs, which come behind all other
/// code; see `program_small`.
pub(super) const N_SMALL_SHIFT: u32 = 16;
/// In the header, that some pass adds up rows, and that there are selections.
pub(super) const HAS_SUMS: u32 = 1 << 24;
pub(super) const HAS_SELECTIONS: u32 = 1 << 25;

/// What a program comes to, before it has an order.
#[derive(Default)]
pub(super) struct Parts {
    /// For each value that is a row or a set, how it is made.
    pub(super) elements: Vec<Option<Element>>,
    /// By stage.
    pub(super) scalars: Vec<(usize, Scalar)>,
    pub(super) gathers: Vec<Gather>,
    pub(super) selections: Vec<Selection>,
    /// By the pass at whose beginning they are filled.
    pub(super) fills: Vec<(usize, Entry)>,
    pub(super) n_planes: usize,
    pub(super) sources: Vec<Source>,
}

/// The numbers that a program gives.
pub(super) struct Ends {
    pub(super) token: u8,
    pub(super) reports: Vec<u8>,
    pub(super) next_state: Vec<u8>,
}

impl Parts {
    pub(super) fn encode(&self, ends: &Ends) -> Result<EncodedProgram, PlanError> {
        let scalars = self.scalars.iter().map(|&(stage, _)| stage);
        let passes = self.gathers.iter().map(|gather| gather.pass);
        let n_stages = scalars.chain(passes).chain(self.selections.iter().map(|s| s.pass)).max().unwrap_or(0);
        let mut list = List::default();
        self.encode_numbers(&mut list, 0)?;
        for pass in 1..=n_stages {
            let fills: Vec<Entry> = self.fills.iter().filter(|f| f.0 == pass).map(|f| f.1).collect();
            list.step(Code::Fill, &fills, 0);
            let gathers: Vec<&Gather> = self.gathers.iter().filter(|gather| gather.pass == pass).collect();
            for is_within in [true, false] {
                let is_one = |gather: &&&Gather| list.is_listed(gather.within) == is_within;
                let roots: Vec<Root> = gathers.iter().filter(is_one).map(|gather| gather.root).collect();
                self.encode_pass(&mut list, &roots, if is_within { WITHIN_LIST } else { 0 })?;
            }
            for selection in self.selections.iter().filter(|selection| selection.pass == pass) {
                self.encode_selection(&mut list, selection)?;
            }
            self.encode_numbers(&mut list, pass)?;
        }
        let numbers = |numbers: &[u8], first: usize| {
            Entry([0, 1, 2, 3].map(|i| u32::from(numbers.get(first + i).copied().unwrap_or(NO_NUMBER))))
        };
        let kind = list.small.finish(list.steps.len(), list.code.len(), self.sources.len());
        let n_small = list.small.entries.len();
        list.code.append(&mut list.small.entries);
        let (n_steps, n_code, n_sources) = (list.steps.len(), list.code.len(), self.sources.len());
        let code_start = N_HEADER + n_steps;
        for step in &mut list.steps {
            step.0[1] += code_start as u32;
        }
        let mut entries = vec![
            Entry([
                n_steps as u32 | (n_small as u32) << N_SMALL_SHIFT,
                u32::from(ends.token)
                    | (self.n_planes as u32) << 8
                    | (list.n_registers as u32) << 16
                    | list.flags,
                n_sources as u32,
                (code_start + n_code + n_sources) as u32,
            ]),
            numbers(&ends.reports, 0),
            numbers(&ends.next_state, 0),
            numbers(&ends.next_state, 4),
        ];
        entries.extend(list.steps);
        entries.extend(list.code);
        entries.extend(self.sources.iter().map(|&source| source_entry(source)));
        Ok(EncodedProgram { entries, n_planes: self.n_planes, n_passes: list.n_passes, kind })
    }

    fn encode_numbers(&self, list: &mut List, stage: usize) -> Result<(), PlanError> {
        let of_stage = || self.scalars.iter().filter(|scalar| scalar.0 == stage).map(|scalar| scalar.1);
        // What is given comes first: it needs no order.
        let given = of_stage().filter_map(|scalar| match scalar {
            Scalar::Given(entry) => Some(entry),
            _ => None,
        });
        let mut entries: Vec<Entry> = given.collect();
        let mut n_given = entries.len() as u32;
        for scalar in of_stage() {
            match scalar {
                Scalar::Given(_) => {}
                Scalar::Instruction(entry) => entries.push(entry),
                Scalar::Take { result, row, token } => {
                    list.step(Code::Numbers, &std::mem::take(&mut entries), std::mem::take(&mut n_given));
                    let operands = [row, Taken::Immediate(0), Taken::Number(token)];
                    let code = list.code(&self.elements, &[Root { code: Code::Take, result, operands }])?;
                    list.step(Code::Take, &code, code.len() as u32);
                }
            }
        }
        list.step(Code::Numbers, &entries, n_given);
        Ok(())
    }

    /// One reading that makes all roots, or as many as it takes.
    fn encode_pass(&self, list: &mut List, roots: &[Root], flags: u32) -> Result<(), PlanError> {
        if roots.is_empty() {
            return Ok(());
        }
        let n_gathered: usize = roots.iter().map(|root| n_gathered(root.code)).sum();
        let n_sums = roots.iter().filter(|root| is_sum(root.code)).count();
        let fits = n_gathered <= N_GATHERED && n_sums <= N_SUMS;
        let (mut gathered, mut sums) = (0, 0);
        let slots: Vec<u8> = roots
            .iter()
            .map(|root| {
                let next = if is_sum(root.code) { &mut sums } else { &mut gathered };
                *next += n_gathered_or_one(root.code);
                (*next - n_gathered_or_one(root.code)) as u8
            })
            .collect();
        let placed: Vec<Root> =
            roots.iter().zip(&slots).map(|(root, &slot)| Root { result: slot, ..*root }).collect();
        let made =
            if fits { pass_code(&self.elements, &placed, flags & WITHIN_LIST != 0) } else { Err(TooLarge) };
        match made {
            Ok(PassCode { entries: code, n_plain, n_registers }) => {
                list.n_registers = list.n_registers.max(n_registers);
                // Where its code begins for the kernels of small programs.
                let small = list.small.push_pass(&self.elements, &placed);
                let finish = |(root, &slot): (&Root, &u8)| {
                    let max = match root.operands[2] {
                        Taken::Number(number) => u32::from(number),
                        _ => 0,
                    };
                    Entry([root.code as u32 | u32::from(root.result) << 8, u32::from(slot), max, small])
                };
                let finishes: Vec<Entry> = roots.iter().zip(&slots).map(finish).collect();
                let n_code = code.len();
                let flags = flags | n_plain << N_PLAIN_SHIFT;
                list.step_with(Code::Pass, flags, &[code, finishes].concat(), n_code as u32);
                list.n_passes += 1;
                list.flags |= if n_sums > 0 { HAS_SUMS } else { 0 };
                Ok(())
            }
            Err(TooLarge) if roots.len() > 1 => {
                let (first, second) = roots.split_at(roots.len() / 2);
                self.encode_pass(list, first, flags)?;
                self.encode_pass(list, second, flags)
            }
            Err(TooLarge) => Err(too_large(TooLarge)),
        }
    }

    fn encode_selection(&self, list: &mut List, selection: &Selection) -> Result<(), PlanError> {
        let Selection {
            value, code, order, row, largest_order, largest_row, argument, bound, within, ..
        } = *selection;
        let operands = [order, row, Taken::Immediate(0)];
        let root = Root { code: Code::Rank, result: 0, operands };
        let is_within = list.is_listed(within);
        let PassCode { mut entries, n_plain, n_registers } =
            pass_code(&self.elements, &[root], is_within).map_err(too_large)?;
        list.n_registers = list.n_registers.max(n_registers);
        let n_code = entries.len() as u32;
        entries.push(Entry([bound, argument, largest_order, largest_row].map(u32::from)));
        let flags = if is_within { WITHIN_LIST } else { 0 } | n_plain << N_PLAIN_SHIFT;
        list.step_with(code, flags, &entries, n_code);
        list.flags |= HAS_SELECTIONS;
        if code == Code::Largest {
            list.listed = Some(value);
        }
        Ok(())
    }
}

fn too_large(TooLarge: TooLarge) -> PlanError {
    PlanError::Registers { max: N_REGISTERS }
}

/// What a reading of the row does: plain roots, then code. For a reading of a list, whose code is for the list: it is
/// that of all roots, and the plain ones are for the row, if all are.
struct PassCode {
    entries: Vec<Entry>,
    /// Entries of plain roots.
    n_plain: u32,
    n_registers: usize,
}

fn pass_code(elements: &[Option<Element>], roots: &[Root], is_within: bool) -> Result<PassCode, TooLarge> {
    let (mut entries, mut others) = (Vec::new(), Vec::new());
    for root in roots {
        match plain(elements, root) {
            Some(plain) => entries.extend(plain),
            None => others.push(*root),
        }
    }
    if entries.len() > N_PLAIN_MAX || is_within && !others.is_empty() {
        entries.clear();
    }
    if entries.is_empty() || is_within {
        others = roots.to_vec();
    }
    let n_plain = entries.len() as u32;
    let mut n_registers = 0;
    if !others.is_empty() {
        let (of_others, n) = code(elements, &others)?;
        entries.extend(of_others);
        n_registers = n;
    }
    Ok(PassCode { entries, n_plain, n_registers })
}

fn is_sum(code: Code) -> bool {
    matches!(code, Code::Sum | Code::Squares)
}

/// Places in what a reading gathers, besides sums.
fn n_gathered(code: Code) -> usize {
    match code {
        Code::Sum | Code::Squares => 0,
        Code::Entropy => 2,
        _ => 1,
    }
}

fn n_gathered_or_one(code: Code) -> usize {
    n_gathered(code).max(1)
}

/// Steps and code on their way into a plan.
#[derive(Default)]
struct List {
    steps: Vec<Entry>,
    code: Vec<Entry>,
    n_registers: usize,
    flags: u32,
    n_passes: usize,
    small: SmallCode,
    /// The selection whose tokens are listed, if they are few.
    listed: Option<u8>,
}

impl List {
    /// Elementwise code with a root.
    fn code(&mut self, elements: &[Option<Element>], roots: &[Root]) -> Result<Vec<Entry>, PlanError> {
        let (code, n_registers) = code(elements, roots).map_err(too_large)?;
        self.n_registers = self.n_registers.max(n_registers);
        Ok(code)
    }

    fn is_listed(&self, within: Option<u8>) -> bool {
        within.is_some() && within == self.listed
    }

    /// A step over entries, of which the first `n_first` are code where there is some, or numbers that need no order; none
    /// over nothing.
    fn step(&mut self, code: Code, entries: &[Entry], n_first: u32) {
        self.step_with(code, 0, entries, n_first);
    }

    fn step_with(&mut self, code: Code, flags: u32, entries: &[Entry], n_first: u32) {
        if !entries.is_empty() {
            let start = self.code.len() as u32;
            self.code.extend_from_slice(entries);
            if !matches!(code, Code::Numbers | Code::Pass) {
                self.small.refuse();
            }
            self.steps.push(Entry([code as u32 | flags, start, entries.len() as u32, n_first]));
        }
    }
}
