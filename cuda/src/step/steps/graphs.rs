//! Steps, and parts of steps, that are captured once and run again as a whole.

use trellis_engine::backend::Damage;

use super::Steps;
use crate::driver::Graph;
use crate::model::{Llama, LogitsOf, LogitsRows};
use crate::ops::logits::Stages;
use crate::ops::program_plan::ProgramKind;
use crate::step::captured::Met;
use crate::step::{Count, Dims, Group, Layout};
use crate::{CudaError, Slice, Stream};

/// What tells graphs apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct GraphKey {
    part: Part,
    dims: Dims,
    logits_of: LogitsOf,
    stages: Stages,
    program_kind: ProgramKind,
    /// Whether hidden states after the final norm stay in memory.
    keeps_hidden: bool,
}

/// How much of a step a graph runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Part {
    Whole,
    /// Up to the logits.
    Layers,
    /// What is asked of the logits.
    Draws,
}

impl Steps {
    /// Runs a step that can be captured.
    pub(super) fn run_whole(
        &mut self,
        stream: &Stream,
        llama: &Llama,
        kv: Slice,
        layout: &Layout,
    ) -> Result<(), CudaError> {
        let logits_of = self.lists.logits_of();
        let group = self.group_of(layout);
        let key = GraphKey {
            part: Part::Whole,
            dims: layout.dims,
            logits_of,
            stages: group.stages,
            program_kind: group.program_kind,
            keeps_hidden: group.keeps_hidden(),
        };
        self.run_graph(stream, key, |steps| {
            steps.launch_layers(stream, llama, kv, layout, logits_of)?;
            let rows = layout.output_rows(steps.memory.slice(), 0, group.n_outputs);
            steps.launch_outputs(stream, llama, layout, 0, &group, rows)
        })
    }

    /// Runs such a step as far as its logits.
    pub(super) fn run_to_logits(
        &mut self,
        stream: &Stream,
        llama: &Llama,
        kv: Slice,
        layout: &Layout,
    ) -> Result<(), CudaError> {
        let logits_of = self.lists.logits_of();
        let key = GraphKey {
            part: Part::Layers,
            dims: layout.dims,
            logits_of,
            stages: Stages::default(),
            program_kind: ProgramKind::Any,
            keeps_hidden: self.lists.outputs.groups[0].keeps_hidden(),
        };
        self.run_graph(stream, key, |steps| steps.launch_layers(stream, llama, kv, layout, logits_of))
    }

    /// Runs the rest of it, as output rows in another place say.
    pub(super) fn run_draws(
        &mut self,
        stream: &Stream,
        llama: &Llama,
        layout: &Layout,
        group: &Group,
        output_rows: Slice,
    ) -> Result<(), CudaError> {
        let key = GraphKey {
            part: Part::Draws,
            dims: layout.dims,
            logits_of: LogitsOf::Some,
            stages: group.stages,
            program_kind: group.program_kind,
            keeps_hidden: false,
        };
        self.run_graph(stream, key, |steps| {
            steps.launch_outputs(stream, llama, layout, 0, group, output_rows)
        })
    }

    /// The one group of a step that can be captured, as large as its bucket.
    pub(super) fn group_of(&self, layout: &Layout) -> Group {
        Group {
            n_logits_rows: layout.dims.n_logits_rows,
            n_outputs: layout.dims.n_outputs,
            n_programs: layout.dims.n_programs,
            n_chains: layout.dims.n_programs,
            ..self.lists.outputs.groups[0].clone()
        }
    }

    /// Launches the layers and the head, without the kernels over logits.
    pub(super) fn launch_layers(
        &self,
        stream: &Stream,
        llama: &Llama,
        kv: Slice,
        layout: &Layout,
        logits_of: LogitsOf,
    ) -> Result<(), CudaError> {
        llama.layers(stream, &self.tensors(kv, layout), &self.activations, |_| Ok(()))?;
        self.launch_head(stream, llama, layout, logits_of)
    }

    /// Launches the head over what the layers made.
    pub(super) fn launch_head(
        &self,
        stream: &Stream,
        llama: &Llama,
        layout: &Layout,
        logits_of: LogitsOf,
    ) -> Result<(), CudaError> {
        let memory = self.memory.slice();
        let n_rows = layout.dims.n_logits_rows;
        let rows = layout.count(memory, Count::LogitsRows { group_idx: 0 }, n_rows);
        let kept = self.kept(layout, 0, n_rows);
        let keeps_hidden = self.lists.outputs.groups[0].keeps_hidden();
        let asked = LogitsRows { rows, kept, logits_of, keeps_hidden };
        llama.logits(stream, asked, &self.activations)
    }

    fn run_graph(
        &mut self,
        stream: &Stream,
        key: GraphKey,
        launch: impl Fn(&Self) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let met = self.captured.launch(key);
        let refused = match (met, self.captured.graph(&key)) {
            (Met::Never, _) => {
                let launched = launch(self);
                if launched.is_err() {
                    self.captured.remove(key);
                }
                return launched;
            }
            (Met::Refused, _) => return launch(self),
            (Met::Captured, Some(graph)) => match graph.launch(stream) {
                Ok(()) => return Ok(()),
                Err(error) => error,
            },
            (Met::Once | Met::Captured, _) => {
                let captured = Graph::capture(stream, || launch(self))
                    .and_then(|graph| graph.launch(stream).map(|()| graph));
                match captured {
                    Ok(graph) => {
                        self.captured.keep(key, graph);
                        let (n_steps, n_bytes) = (self.captured.len(), self.captured.n_bytes());
                        tracing::debug!(?key, n_steps, n_bytes, "a step was captured");
                        return Ok(());
                    }
                    Err(error) => error,
                }
            }
        };
        if refused.damage() == Damage::Device {
            return Err(refused);
        }
        // Nothing of it ran, and a graph only saves time.
        launch(self)?;
        self.captured.refuse(key);
        if refused.is_out_of_memory() {
            self.captured.remove_oldest_graph();
        }
        if !std::mem::replace(&mut self.has_warned, true) {
            tracing::warn!(error = %refused, "a step runs without a graph, as will others that cannot be captured");
        }
        Ok(())
    }
}
