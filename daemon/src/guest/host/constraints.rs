//! `constraints`

use std::sync::Arc;

use trellis_engine::constraint::{
    Begins, Constraint, ConstraintError, ConstraintLimits, Grammar, Rule, Trial, Whitespace,
};
use wasmtime::component::Resource;

use super::convert::{check_tokens, count, invalid};
use super::types::{GivenConstraint, GuestConstraint, GuestModel, GuestSampler, HeldConstraint, HostError};
use crate::guest::bindings::trellis::host::constraints as wit;
use crate::guest::bindings::trellis::host::constraints::{Host, HostConstraint};
use crate::guest::bindings::trellis::host::types::{Error as ApiError, GrammarExit, GrammarRefusal};
use crate::guest::limits::GuestLimits;
use crate::guest::rooms::Need;
use crate::guest::store::GuestState;
use crate::guest::trials::WrittenTrial;

/// The longest text after which a constraint begins. The text of each token is searched for it.
const BEGINNING_BYTES_MAX: usize = 256;

impl GuestLimits {
    fn of_constraint(&self) -> ConstraintLimits {
        ConstraintLimits {
            grammar_bytes: self.constraint_bytes,
            n_symbols: self.constraint_symbols,
            n_states: self.constraint_states,
            mask_ms: self.constraint_mask_ms,
        }
    }
}

impl Host for GuestState {}

impl HostConstraint for GuestState {
    async fn compile(
        &mut self,
        model: Resource<GuestModel>,
        grammar: wit::Grammar,
    ) -> Result<Resource<GuestConstraint>, HostError> {
        let model = self.table.get(&model)?.model.clone();
        let (grammar, limits) = (self::grammar(grammar), self.limits.of_constraint());
        let (handle, account) = (trellis_engine::ModelHandle::clone(&model), self.owner.account.clone());
        let grammar = Arc::new(grammar);
        let need = self.need_of(&grammar, &handle, limits).await?;
        let compile = move || Constraint::compile(&grammar, &handle, limits, &account);
        let constraint = Arc::new(self.beside.run_in_room(&self.owner, &self.cpu, need, compile).await?);
        self.give(GuestConstraint { held: Arc::new(HeldConstraint { constraint, model }) })
    }

    fn drop(&mut self, constraint: Resource<GuestConstraint>) -> wasmtime::Result<()> {
        self.table.delete(constraint)?;
        Ok(())
    }
}

impl GuestState {
    /// The room that compiling a grammar takes. Where the process is not that of the guest's user alone, it is tried out elsewhere.
    async fn need_of(
        &mut self,
        grammar: &Arc<Grammar>,
        model: &trellis_engine::ModelHandle,
        limits: ConstraintLimits,
    ) -> Result<Need, HostError> {
        let Some(trials) = self.trials.clone() else { return Ok(Need::of_grammar(grammar.n_bytes())) };
        let (tried, model) = (grammar.clone(), model.clone());
        let write = move || Trial::new(&tried, &model, limits).map(|trial| WrittenTrial::new(&trial));
        let trial = self.beside.run(&self.owner, &self.cpu, write).await?;
        let tried = trials.run(self.owner.actor, &trial).await.map_err(|error| {
            tracing::error!(%error, "a grammar was not tried out");
            ApiError::EngineFailed("the grammar could not be tried out; another time it may be".to_owned())
        })?;
        self.cpu.add(tried.time);
        Ok(Need::of_tried_grammar(grammar.n_bytes(), tried.memory?))
    }

    /// Puts a constraint on a sampler, or takes it off.
    pub(super) fn constrain(
        &mut self,
        sampler: &Resource<GuestSampler>,
        constraint: Option<Resource<GuestConstraint>>,
        begins: wit::Beginning,
    ) -> Result<(), HostError> {
        let given = match constraint {
            Some(constraint) => {
                let held = self.table.get(&constraint)?.held.clone();
                let begins = match begins {
                    wit::Beginning::FirstDraw => Begins::FirstDraw,
                    wit::Beginning::At(position) => Begins::At(position as usize),
                    wit::Beginning::AfterToken(token) => {
                        check_tokens(&held.model, &[token])?;
                        Begins::AfterToken(token)
                    }
                    wit::Beginning::AfterText(text) => {
                        if text.is_empty() || text.len() > BEGINNING_BYTES_MAX {
                            let expected = format!("1 to {BEGINNING_BYTES_MAX} bytes");
                            return Err(invalid("after-text", format!("{text:?}"), expected));
                        }
                        Begins::AfterText(text)
                    }
                };
                let rule = Arc::new(Rule::new(held.constraint.clone(), begins));
                Some(GivenConstraint { rule, held })
            }
            None => None,
        };
        self.table.get_mut(sampler)?.given.constraint = given;
        Ok(())
    }
}

fn grammar(grammar: wit::Grammar) -> Grammar {
    match grammar {
        wit::Grammar::JsonSchema(wit::JsonSchema { schema, whitespace }) => {
            let whitespace = match whitespace {
                wit::Whitespace::Compact => Whitespace::Compact,
                wit::Whitespace::Free => Whitespace::Free,
            };
            Grammar::JsonSchema { schema, whitespace }
        }
        wit::Grammar::Regex(regex) => Grammar::Regex(regex),
        wit::Grammar::Lark(text) => Grammar::Lark(text),
        wit::Grammar::Choice(texts) => Grammar::Choice(texts),
    }
}

impl From<ConstraintError> for HostError {
    fn from(error: ConstraintError) -> Self {
        let text = error.to_string();
        let refused = match error {
            ConstraintError::Refused { place, reason } => {
                ApiError::GrammarRefused(GrammarRefusal { place, reason })
            }
            ConstraintError::TooLong { n_bytes, n_bytes_max } => {
                return invalid("grammar", format!("{n_bytes} bytes"), format!("at most {n_bytes_max}"));
            }
            ConstraintError::Vocabulary { n_bytes, n_bytes_max } => {
                return invalid(
                    "model",
                    format!("a vocabulary of {n_bytes} bytes"),
                    format!("at most {n_bytes_max}"),
                );
            }
            ConstraintError::Left { position, token } => {
                ApiError::GrammarLeft(GrammarExit { position: count(position), token })
            }
            ConstraintError::TooComplex { .. } => ApiError::GrammarTooComplex(text),
            ConstraintError::Budget(exceeded) => return exceeded.into(),
        };
        refused.into()
    }
}
