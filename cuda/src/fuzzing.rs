//! What fuzzers run beside the public API: logit programs on a device, beside the processor. Nothing else uses it, and without the
//! feature `fuzzing` it is not there.

use std::sync::Arc;

use trellis_engine::sampling::program::{DrawInputs, Machine, Program};

use crate::bare::TestGpu;
use crate::ops::program::N_CHAINS_FEW;
use crate::ops::program_plan::ProgramKind;
use crate::ops::program_plan::{EncodedProgram, PlanError};
use crate::ops::program_trial::{CaseRow, difference, run, run_small};
use crate::{CudaError, Gpu};

/// Rows of a chain where there are many chains, and where there are few: they share their planes.
const MANY_CHAINS_LEN: usize = 2;
const FEW_CHAINS_LEN: usize = 3;

/// A program, and all that it looks at.
#[derive(Debug)]
pub struct ProgramRow(CaseRow);

impl ProgramRow {
    /// A row that draws.
    ///
    /// # Errors
    /// The program is one that devices do not run.
    pub fn new(program: &Program, inputs: &DrawInputs<'_>) -> Result<Self, PlanError> {
        Ok(Self(CaseRow {
            plan: EncodedProgram::new(program)?,
            program: program.clone(),
            logits: inputs.logits.to_vec(),
            members: inputs.members.iter().map(|row| row.to_vec()).collect(),
            history: inputs.history.to_vec(),
            position: inputs.position,
            n_drawn: inputs.n_drawn,
            seed: inputs.seed,
            parameters: inputs.parameters.to_vec(),
            state: inputs.state,
            masks: inputs.masks.to_vec(),
            biases: inputs.biases.to_vec(),
            constraint: inputs.constraint.map(|mask| Arc::new(mask.clone())),
        }))
    }
}

/// The first device, with the kernels of logit programs, which are compiled for the first rows and serve all that follow.
pub struct ProgramDevice(TestGpu);

impl std::fmt::Debug for ProgramDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ProgramDevice").finish_non_exhaustive()
    }
}

impl ProgramDevice {
    /// # Errors
    /// There is none that can be used.
    pub fn open() -> Result<Self, CudaError> {
        Gpu::open(0).map(|gpu| Self(TestGpu::on(gpu)))
    }

    /// Runs rows of one vocabulary in launches of many and of few, and by the kernels
    /// for small programs as far as these run them; says for each how what the device gives differs from what the
    /// processor gives, to the bit: token, fault, state and reports.
    ///
    /// # Panics
    /// The device fails, or writes where it may not.
    #[must_use]
    pub fn differences(&self, rows: &[ProgramRow], vocab_size: usize) -> Vec<Option<String>> {
        let mut machine = Machine::default();
        let of_launch = |rows: &[&CaseRow], machine: &mut Machine, chain_len| {
            let answers = run(&self.0, rows, chain_len, vocab_size);
            let pairs = rows.iter().zip(&answers);
            pairs.map(|(row, answer)| difference(&row.expected(machine), answer)).collect::<Vec<_>>()
        };
        let rows: Vec<&CaseRow> = rows.iter().map(|row| &row.0).collect();
        let mut found = of_launch(&rows, &mut machine, MANY_CHAINS_LEN);
        // One chain of a bucket is none of the rows'.
        let n_few = FEW_CHAINS_LEN * (N_CHAINS_FEW - 1);
        let few = rows.chunks(n_few).flat_map(|rows| of_launch(rows, &mut machine, FEW_CHAINS_LEN));
        let few: Vec<Option<String>> = few.collect();
        for (of_many, of_few) in found.iter_mut().zip(few) {
            *of_many = of_many.take().or(of_few);
        }
        for kind in [ProgramKind::SinglePass, ProgramKind::Passes] {
            let small: Vec<usize> = (0..rows.len()).filter(|&idx| rows[idx].plan.kind() <= kind).collect();
            if small.is_empty() {
                continue;
            }
            let rows: Vec<&CaseRow> = small.iter().map(|&idx| rows[idx]).collect();
            let answers = run_small(&self.0, &rows, vocab_size, kind);
            for ((&idx, row), answer) in small.iter().zip(rows).zip(&answers) {
                let of_small = difference(&row.expected(&mut machine), answer);
                found[idx] = found[idx].take().or(of_small);
            }
        }
        found
    }
}
