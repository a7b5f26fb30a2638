//! What comes of a sampler behind what the operator puts in front of it.

use std::collections::BTreeMap;
use std::sync::Arc;

use trellis_programs::library::{self, Chain, Penalties};
use trellis_programs::{BiasId, Definition};

use super::{Kept, N_KEPT_MAX, Operator, Purpose, both};
use crate::batch::Token;
use crate::sampling::program::{Program, PutOn};
use crate::sampling::{Bias, Sampler, TokenMask};

impl Operator {
    pub(super) fn behind(&self, sampler: &Sampler, purpose: Purpose, kept: &mut Kept) -> Sampler {
        let mut sampler = sampler.clone();
        if self.front.is_some() && sampler.program.is_none() {
            match self.chain(&sampler, purpose) {
                Some(put_on) => sampler.program = Some(Box::new(put_on)),
                // No chain that was validated comes here; one that was not draws nothing.
                None => sampler.mask = Some(Arc::new(TokenMask::none(self.shape.vocab_size))),
            }
        }
        match &mut sampler.program {
            None => self.narrow(&mut sampler.mask),
            Some(put_on) => {
                self.narrow(&mut put_on.within);
                if let Some(front) = &self.front {
                    let n_members = if let Purpose::Draws { n_members } = purpose { n_members } else { 0 };
                    put_on.program = composed(&put_on.program, front, n_members, kept);
                }
            }
        }
        sampler
    }

    /// Leaves of a mask what may be drawn.
    fn narrow(&self, mask: &mut Option<Arc<TokenMask>>) {
        let Some(allowed) = &self.allowed else { return };
        *mask = Some(match mask.as_deref() {
            None => allowed.clone(),
            Some(mask) => Arc::new(both(mask, allowed)),
        });
    }

    /// The program that does what the sampler's chain does.
    fn chain(&self, sampler: &Sampler, purpose: Purpose) -> Option<PutOn> {
        let bias = summed(&sampler.bias);
        let penalties = Penalties {
            last_n: sampler.penalty_last_n,
            repetition: sampler.repetition_penalty,
            frequency: sampler.frequency_penalty,
            presence: sampler.presence_penalty,
        };
        let chain = Chain {
            // What is outside of the mask is not seen behind the front.
            mask: None,
            bias: (!bias.is_empty()).then_some(BiasId(0)),
            bias_over: None,
            penalties: sampler.penalizes().then_some(penalties),
            temperature: sampler.temperature,
            top_k: sampler.top_k,
            top_p: sampler.top_p.filter(|&p| p < 1.0),
            min_p_log: sampler.min_p.filter(|&p| p > 0.0).map(f32::ln),
        };
        let definition = match purpose {
            Purpose::Draws { .. } => Definition::build(|b| library::chain(b, chain)),
            Purpose::Ranks => Definition::build_row(|b| library::adjusted(b, chain)),
        };
        let program = Program::new(definition, self.shape).ok()?;
        let biases = match bias.is_empty() {
            true => Vec::new(),
            false => vec![Arc::new(Bias::sparse(bias, self.shape.vocab_size).ok()?)],
        };
        Some(PutOn { biases, within: sampler.mask.clone(), ..PutOn::new(Arc::new(program)) })
    }
}

/// The chain adds all that it is given for a token.
fn summed(bias: &[(Token, f32)]) -> Vec<(Token, f32)> {
    let mut sums: BTreeMap<Token, f32> = BTreeMap::new();
    for &(token, value) in bias {
        *sums.entry(token).or_default() += value;
    }
    sums.into_iter().collect()
}

fn composed(program: &Program, front: &Program, n_members: usize, kept: &mut Kept) -> Arc<Program> {
    let key = (program.id(), n_members);
    if let Some(composed) = kept.programs.get(&key) {
        return composed.clone();
    }
    let composed = Arc::new(program.behind(front, n_members));
    if kept.programs.len() >= N_KEPT_MAX {
        kept.programs.clear();
    }
    kept.programs.insert(key, composed.clone());
    composed
}
