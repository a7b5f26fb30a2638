//! What a step's launches take: where its parts lie in the memory of steps.

use super::Steps;
use crate::model::{LayerInputs, Llama, StepMasses};
use crate::ops::attention::Workspace;
use crate::ops::common::RowCount;
use crate::ops::embedding::TokenIds;
use crate::ops::gather::Kept;
use crate::ops::logits::{LogitsBuffers, RowOutput};
use crate::ops::program::{ProgramBuffers, ProgramOutput};
use crate::ops::steer::SteeringPlaces;
use crate::step::{Count, Group, Layout, N_SCORES_MAX, ReturnedStarts, Steers};
use crate::{CudaError, Slice, Stream};

impl Steps {
    pub(super) fn tensors(&self, kv: Slice, layout: &Layout) -> LayerInputs {
        let n_tokens = layout.dims.n_tokens;
        let memory = self.memory.slice();
        let slice = |start, n| Layout::slice(memory, start, n);
        LayerInputs {
            tokens: layout.count(memory, Count::Tokens, n_tokens),
            ids: TokenIds { ids: slice(layout.tokens, n_tokens), slots: Layout::slots(memory) },
            positions: slice(layout.positions, n_tokens),
            kv_cells: slice(layout.kv_cells, n_tokens),
            page_tokens: self.page_tokens.slice(),
            // Shares say where in the steps' memory a context's page table begins.
            entries: memory,
            holes: layout.dims.has_holes().then(|| slice(layout.holes, n_tokens)),
            attention: (0..layout.dims.n_windows).map(|idx| layout.attention(memory, idx)).collect(),
            workspace: Workspace { arrivals: self.arrivals.slice(), partial: self.activations.partial },
            kv,
            masses: self.masses(layout),
            steering: (layout.dims.steering == Steers::Some)
                .then(|| SteeringPlaces { places: slice(layout.steering, n_tokens), memory }),
        }
    }

    /// Tokens whose attention is asked for; it comes back behind the lists.
    fn masses(&self, layout: &Layout) -> StepMasses {
        let outputs = &self.lists.outputs;
        let start = ReturnedStarts::of(layout.dims.n_outputs, layout.dims.n_programs).extra;
        let n = outputs.masses.n_words();
        let out = self.returned.slice().part(4 * (start + outputs.n_list_words()), 4 * n);
        StepMasses { queries: outputs.masses.queries.clone(), out }
    }

    /// Where rows of logits come from, and which slots keep their hidden states.
    pub(super) fn kept(&self, layout: &Layout, start: usize, n: usize) -> Kept {
        let memory = self.memory.slice();
        Kept {
            indices: Layout::slice(memory, layout.gather + start, n),
            keeps: Layout::slice(memory, layout.keeps + start, n),
            states: self.states.slice(),
        }
    }

    /// Launches the kernels over a group's logits.
    pub(super) fn launch_outputs(
        &self,
        stream: &Stream,
        llama: &Llama,
        layout: &Layout,
        group_idx: usize,
        group: &Group,
        output_rows: Slice,
    ) -> Result<(), CudaError> {
        let memory = self.memory.slice();
        let (start, n) = (group.outputs_start, group.n_outputs);
        let starts = ReturnedStarts::of(layout.dims.n_outputs, layout.dims.n_programs);
        let returned = self.returned.slice();
        let extra = returned.part(4 * starts.extra, returned.n_bytes - 4 * starts.extra);
        let programs_start = 4 * starts.programs + group.programs_start * size_of::<ProgramOutput>();
        let program_outputs = returned.part(programs_start, group.n_programs * size_of::<ProgramOutput>());
        let has_programs = group.n_programs > 0;
        if has_programs {
            self.launch_programs(stream, llama, layout, group_idx, group, output_rows, program_outputs)?;
        }
        let RowCount { n: n_rows, .. } = layout.count(memory, Count::Outputs { group_idx }, n);
        let buffers = LogitsBuffers {
            logits: self.activations.logits,
            rows: output_rows,
            n_rows,
            tables: memory,
            page_tokens: self.page_tokens.slice(),
            slots: Layout::slots(memory),
            biases: memory,
            masks: memory,
            score_tokens: Layout::slice(memory, layout.tail, N_SCORES_MAX),
            scratch: self.activations.scratch,
            outputs: returned.part(start * size_of::<RowOutput>(), n * size_of::<RowOutput>()),
            top: extra,
            scores: extra,
            program_outputs,
        };
        let programs = has_programs.then_some(self.beside.done());
        // SAFETY: the lists keep rows of logits below those of the group, and places in the tail, in the slots, in the
        // tables and in what comes back inside the memory that was taken for the most there can be, `supply` those of late
        // masks in theirs; the engine keeps pages below their number, and tokens below the vocabulary. All of it lives as
        // long as `self`, which waits for the stream before it goes.
        let launched = unsafe {
            llama.kernels().logits.run(stream, &buffers, n, llama.config.vocab_size, group.stages, programs)
        };
        match (launched, programs) {
            // It may not have come to waiting.
            (Err(error), Some(drawn)) => stream.wait_for(drawn).and(Err(error)),
            (launched, _) => launched,
        }
    }

    /// Launches the programs of a group beside the kernels over its logits, of which the last waits for their tokens.
    #[expect(clippy::too_many_arguments, reason = "where a group's things lie")]
    fn launch_programs(
        &self,
        stream: &Stream,
        llama: &Llama,
        layout: &Layout,
        group_idx: usize,
        group: &Group,
        output_rows: Slice,
        outputs: Slice,
    ) -> Result<(), CudaError> {
        let memory = self.memory.slice();
        let n_chains = layout.count(memory, Count::Chains { group_idx }, group.n_chains);
        let buffers = ProgramBuffers {
            programs: memory,
            rows: layout.program_rows(memory, group.programs_start, group.n_programs),
            chains: Layout::slice(memory, layout.chains + group.chains_start, group.n_chains),
            n_chains: n_chains.n,
            output_rows,
            logits: self.activations.logits,
            kept_rows: self.kept_rows.slice(),
            members: memory,
            tables: memory,
            page_tokens: self.page_tokens.slice(),
            parameters: memory,
            mask_starts: memory,
            masks: memory,
            bias_places: memory,
            dense_biases: memory,
            bias_pairs: memory,
            states: memory,
            planes: self.program_memory.planes.slice(),
            outputs,
            meetings: self.program_memory.meetings.slice(),
        };
        let kernel = self.card.programs().expect("without it no program is in a step");
        let (n_chains, vocab_size, kind) = (group.n_chains, llama.config.vocab_size, group.program_kind);
        // SAFETY: as in `launch_outputs`; besides, `given` says where plans, masks and biases lie that are there or that this
        // step brings, and `programs` gives a slot's state and a set of planes to one chain, and says what kind all are of.
        self.beside.run(stream, |beside| unsafe { kernel.run(beside, &buffers, n_chains, vocab_size, kind) })
    }
}
