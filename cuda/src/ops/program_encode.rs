//! A plan as a list of entries: the header, steps, sources of noise, code.

use trellis_programs::Source;

use super::program_code::{
    Code, Element, Entry, N_REGISTERS, Operand, Root, Taken, TooLarge, code, instruction, source_entry,
};
use super::program_plan::{N_GATHERED, N_HEADER, N_SUMS, NO_NUMBER, Plan, PlanError};

/// What is gathered, and where it goes.
#[derive(Clone, Copy)]
pub(super) struct Gather {
    pub(super) pass: usize,
    pub(super) root: Root,
}

/// The bound of a selection.
#[derive(Clone, Copy)]
pub(super) struct Selection {
    pub(super) pass: usize,
    pub(super) code: Code,
    pub(super) order: u8,
    pub(super) row: u8,
    pub(super) largest_order: u8,
    pub(super) largest_row: u8,
    pub(super) argument: u8,
    pub(super) bound: u8,
}

/// An operation over numbers, or [`Code::At`].
#[derive(Clone, Copy)]
pub(super) enum Scalar {
    Instruction(Entry),
    At { result: u8, row: u8, token: u8 },
}

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
    pub(super) fn encode(&self, ends: &Ends) -> Result<Plan, PlanError> {
        let scalars = self.scalars.iter().map(|&(stage, _)| stage);
        let passes = self.gathers.iter().map(|gather| gather.pass);
        let n_stages = scalars.chain(passes).chain(self.selections.iter().map(|s| s.pass)).max().unwrap_or(0);
        let mut list = List::default();
        self.encode_numbers(&mut list, 0)?;
        for pass in 1..=n_stages {
            let fills: Vec<Entry> = self.fills.iter().filter(|f| f.0 == pass).map(|f| f.1).collect();
            list.step(Code::Fill, &fills, 0);
            let roots: Vec<Root> = self.gathers.iter().filter(|g| g.pass == pass).map(|g| g.root).collect();
            self.encode_pass(&mut list, &roots)?;
            for selection in self.selections.iter().filter(|selection| selection.pass == pass) {
                self.encode_selection(&mut list, selection)?;
            }
            self.encode_numbers(&mut list, pass)?;
        }
        let numbers = |numbers: &[u8], first: usize| {
            Entry([0, 1, 2, 3].map(|i| u32::from(numbers.get(first + i).copied().unwrap_or(NO_NUMBER))))
        };
        let (n_steps, n_code) = (list.steps.len(), list.code.len());
        let code_start = N_HEADER + n_steps;
        for step in &mut list.steps {
            step.0[1] += code_start as u32;
        }
        for &at in &list.places {
            list.code[at].0[1] += code_start as u32;
        }
        let mut entries = vec![
            Entry([
                n_steps as u32,
                u32::from(ends.token) | (self.n_planes as u32) << 8,
                self.sources.len() as u32,
                (code_start + n_code) as u32,
            ]),
            numbers(&ends.reports, 0),
            numbers(&ends.next_state, 0),
            numbers(&ends.next_state, 4),
        ];
        entries.extend(list.steps);
        entries.extend(list.code);
        entries.extend(self.sources.iter().map(|&source| source_entry(source)));
        Ok(Plan { entries, n_planes: self.n_planes, n_passes: list.n_passes })
    }

    fn encode_numbers(&self, list: &mut List, stage: usize) -> Result<(), PlanError> {
        let of_stage = self.scalars.iter().filter(|scalar| scalar.0 == stage).map(|scalar| scalar.1);
        let mut entries = Vec::new();
        let mut ats = Vec::new();
        for scalar in of_stage {
            match scalar {
                Scalar::Instruction(entry) => entries.push(entry),
                Scalar::At { result, row, token } => {
                    let (code, kept) = code(&self.elements, &[], &[row]).map_err(too_large)?;
                    let start = list.put(&code);
                    let word = code.len() as u32 | u32::from(kept[0]) << 8;
                    ats.push(entries.len());
                    let operands =
                        [Operand::Immediate(start as u32), Operand::Immediate(word), Operand::Number(token)];
                    entries.push(instruction(Code::At, result, operands));
                }
            }
        }
        let start = list.code.len();
        list.places.extend(ats.into_iter().map(|at| start + at));
        list.step(Code::Numbers, &entries, 0);
        Ok(())
    }

    /// One reading that makes all roots, or as many as it takes.
    fn encode_pass(&self, list: &mut List, roots: &[Root]) -> Result<(), PlanError> {
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
        let made = if fits { code(&self.elements, &placed, &[]) } else { Err(TooLarge) };
        match made {
            Ok((code, _)) => {
                let finish = |(root, &slot): (&Root, &u8)| {
                    let max = match root.operands[2] {
                        Taken::Number(number) => u32::from(number),
                        _ => 0,
                    };
                    Entry([root.code as u32 | u32::from(root.result) << 8, u32::from(slot), max, 0])
                };
                let finishes: Vec<Entry> = roots.iter().zip(&slots).map(finish).collect();
                let n_code = code.len();
                list.step(Code::Pass, &[code, finishes].concat(), n_code as u32);
                list.n_passes += 1;
                Ok(())
            }
            Err(TooLarge) if roots.len() > 1 => {
                let (first, second) = roots.split_at(roots.len() / 2);
                self.encode_pass(list, first)?;
                self.encode_pass(list, second)
            }
            Err(TooLarge) => Err(too_large(TooLarge)),
        }
    }

    fn encode_selection(&self, list: &mut List, selection: &Selection) -> Result<(), PlanError> {
        let Selection { code: kind, order, row, largest_order, largest_row, argument, bound, .. } =
            *selection;
        let (mut entries, kept) = code(&self.elements, &[], &[order, row]).map_err(too_large)?;
        let n_code = entries.len() as u32;
        entries.push(Entry([u32::from(kept[0]), u32::from(kept[1]), u32::from(bound), u32::from(argument)]));
        entries.push(Entry([u32::from(largest_order), u32::from(largest_row), 0, 0]));
        list.step(kind, &entries, n_code);
        Ok(())
    }
}

fn too_large(TooLarge: TooLarge) -> PlanError {
    PlanError::Registers { max: N_REGISTERS }
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
    /// Entries of the code whose second word says where code begins.
    places: Vec<usize>,
    n_passes: usize,
}

impl List {
    fn put(&mut self, entries: &[Entry]) -> usize {
        self.code.extend_from_slice(entries);
        self.code.len() - entries.len()
    }

    /// A step over entries, of which the first `n_code` are elementwise code where there is some; none over nothing.
    fn step(&mut self, code: Code, entries: &[Entry], n_code: u32) {
        if !entries.is_empty() {
            let start = self.put(entries);
            self.steps.push(Entry([code as u32, start as u32, entries.len() as u32, n_code]));
        }
    }
}
