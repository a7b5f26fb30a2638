//! Operations behind what the operator puts in front of everybody's samplers. It is put there where the engine takes an
//! operation in: nothing on the guests' side can go around it.

use std::sync::Arc;

use crate::command::{Ask, Operation};
use crate::guess::Guess;
use crate::sampling::{Operator, Purpose, Sampler, TokenMask};

impl Operation {
    /// The same with samplers and masks that draw what may be drawn.
    pub(crate) fn behind(mut self, operator: &Operator) -> Self {
        let draw = |sampler: &mut Arc<Sampler>, n_members| {
            *sampler = operator.before(sampler, Purpose::Draws { n_members });
        };
        let narrow = |mask: &mut Arc<TokenMask>| *mask = operator.within(mask);
        match &mut self {
            Self::Ask { ask, .. } => match ask {
                Ask::Sample(sampler) => draw(sampler, 0),
                Ask::Verify { sampler, guess } => {
                    draw(sampler, 0);
                    if let Guess::Masked { masks, .. } | Guess::Tree { masks, .. } = guess {
                        masks.iter_mut().for_each(narrow);
                    }
                }
                Ask::Mix { sampler, rows } => draw(sampler, rows.len()),
                // They draw nothing: what they give is the model's.
                Ask::Prefill
                | Ask::Top { .. }
                | Ask::Scores(_)
                | Ask::Continuation(_)
                | Ask::Tops { .. }
                | Ask::Full
                | Ask::Logits
                | Ask::Keep
                | Ask::Embedding
                | Ask::Hidden { .. }
                | Ask::Attention { .. } => {}
            },
            Self::DrawTogether { sampler, .. } => draw(sampler, 0),
            Self::Run { settings, .. } => draw(&mut settings.sampler, 0),
            Self::Mix { members, settings, .. } => {
                draw(&mut settings.sampler, members.len().saturating_sub(1))
            }
            Self::SearchBeams(asked) => {
                let sampler = asked.sampler.take().unwrap_or_else(|| Arc::new(Sampler::greedy()));
                asked.sampler = Some(operator.before(&sampler, Purpose::Ranks));
                asked.masks.iter_mut().for_each(narrow);
            }
            Self::Mask { mask, .. } => narrow(mask),
            Self::Create { .. }
            | Self::Open { .. }
            | Self::Edit { .. }
            | Self::Evict { .. }
            | Self::Steer { .. }
            | Self::Fork { .. }
            | Self::Cancel { .. }
            | Self::Pulled { .. }
            | Self::EndRun { .. }
            | Self::Save { .. }
            | Self::Forget { .. }
            | Self::LetGo { .. }
            | Self::Stats { .. }
            | Self::Release { .. } => {}
        }
        self
    }
}
