//! What a context keeps to: the rule that it draws under, and what may come next by it.

use std::sync::Arc;

use tokio::sync::oneshot;

use super::Context;
use super::watch::{Foresight, MasksOfRun};
use crate::account::{BudgetExceeded, Owner};
use crate::batch::Token;
use crate::command::Ask;
use crate::constraint::{Begun, ConstraintError, Next, Rule, Walk};
use crate::error::EngineError;
use crate::guess::Guess;
use crate::mask_threads::{MaskThreads, Piece, caught};
use crate::sampling::{Sampler, TokenMask};

/// The rule under which a context drew last.
#[derive(Debug)]
pub(super) struct Keeping {
    pub(super) rule: Arc<Rule>,
    /// From where on tokens count.
    pub(super) first: usize,
    walk: Arc<Walk>,
}

/// What may come after one hypothesis is being worked out.
pub(super) struct MaskOfRow {
    rule: Arc<Rule>,
    nexts: Nexts,
}

impl MaskOfRow {
    pub(super) async fn there(self, vocab_size: usize) -> Result<Arc<TokenMask>, EngineError> {
        let next = self.nexts.there().await?.remove(0).expect("what may come after a hypothesis");
        Ok(Arc::new(mask_for(next, &self.rule, vocab_size)))
    }
}

impl Keeping {
    /// Has worked out what may come after the tokens of a context and these.
    pub(super) fn mask_after(&self, prompt: &Context, tokens: &[Token]) -> MaskOfRow {
        let (n_prompt, n_tokens) = (prompt.tokens.len(), prompt.tokens.len() + tokens.len());
        let mut counted = prompt.tokens().copy_of(self.first.min(n_prompt)..n_prompt);
        counted.extend_from_slice(&tokens[self.first.clamp(n_prompt, n_tokens) - n_prompt..]);
        let (rule, first, walk) = (self.rule.clone(), self.first, self.walk.clone());
        let place = Place { rule, first, walk, n_tokens, tokens: counted };
        let nexts = place.look_ahead(prompt.model.masks(), prompt.caller.owner(), Guess::NOTHING);
        MaskOfRow { rule: self.rule.clone(), nexts }
    }
}

impl Keeping {
    /// The same for a fork.
    pub(super) fn fork(&self) -> Result<Self, BudgetExceeded> {
        Ok(Self { rule: self.rule.clone(), first: self.first, walk: Arc::new(self.walk.fork()?) })
    }
}

/// What is asked of a matcher: what may come after these tokens, those from `first` on, of the `n_tokens` of a context.
struct Place {
    rule: Arc<Rule>,
    first: usize,
    walk: Arc<Walk>,
    n_tokens: usize,
    tokens: Vec<Token>,
}

impl Place {
    /// Has worked out what may come there, and after each guessed token. The matcher goes there in pieces, as long as somebody
    /// waits for it.
    fn look_ahead(self, masks: &MaskThreads, owner: &Owner, guess: Guess) -> Nexts {
        let (to, nexts) = oneshot::channel();
        let mut to = Some(to);
        masks.run_in_pieces(owner, move |turn| {
            // The receiver may be gone.
            let Some(waiting) = to.take().filter(|to| !to.is_closed()) else { return Piece::Last };
            let Self { rule, first, walk, n_tokens, tokens } = &self;
            let mut is_over = || turn.is_over();
            let nexts = match caught(|| walk.come_near(rule, *first, *n_tokens, tokens, &mut is_over)) {
                Ok(None) => {
                    to = Some(waiting);
                    return Piece::GoesOn;
                }
                Ok(begun) => caught(|| self.nexts(&guess, begun)),
                Err(error) => Err(error),
            };
            let _ = waiting.send(nexts);
            Piece::Last
        });
        Nexts::OnTheirWay(nexts)
    }

    fn nexts(&self, guess: &Guess, begun: Option<Begun>) -> Result<OfPlaces, ConstraintError> {
        let Self { rule, first, walk, n_tokens, tokens } = self;
        match guess.tree() {
            Some(tree) => walk.next_in_tree(rule, *first, *n_tokens, tokens, tree, begun),
            None => {
                let nexts = walk.next(rule, *first, *n_tokens, tokens, guess.tokens(), begun)?;
                Ok(nexts.into_iter().map(Some).collect())
            }
        }
    }
}

/// What may come next is being worked out.
#[derive(Debug)]
pub(super) struct Foreseen {
    n_tokens: usize,
    guess: Guess,
    nexts: Nexts,
}

/// After the context, then after each guessed token; none where the rule does not allow it. Of a chain they end there.
type OfPlaces = Vec<Option<Next>>;

#[derive(Debug)]
enum Nexts {
    OnTheirWay(oneshot::Receiver<Result<OfPlaces, ConstraintError>>),
    There(OfPlaces),
}

impl Nexts {
    async fn there(self) -> Result<OfPlaces, EngineError> {
        match self {
            Self::OnTheirWay(nexts) => Ok(nexts.await.map_err(|_| EngineError::Stopped)??),
            Self::There(nexts) => Ok(nexts),
        }
    }
}

impl Context {
    /// What is drawn from now on keeps to this rule, or to none, until another is named; the model's view of what comes
    /// next is as it was. The place where the rule begins is kept until the context draws under another rule or is
    /// truncated to what comes before it, and goes over to forks.
    ///
    /// # Panics
    /// The constraint was compiled for another model.
    pub fn keep_to(&mut self, rule: Option<&Arc<Rule>>) {
        if let Some(rule) = rule {
            assert!(rule.constraint().is_for(self.model.model()), "the constraint of another model");
        }
        self.rule = rule.cloned();
    }

    /// What is drawn from now on keeps to what another context keeps to, whose tokens this one has, from the same place on: a
    /// draft guesses under the constraint of what it guesses for. Both models have one vocabulary.
    ///
    /// # Errors
    /// There is no host memory left for a matcher.
    ///
    /// # Panics
    /// The constraint was compiled for a vocabulary of another size.
    pub fn keep_as(&mut self, other: &Self) -> Result<(), EngineError> {
        let Some(rule) = &other.rule else {
            self.rule = None;
            return Ok(());
        };
        let (n_words, vocab_size) = (rule.constraint().vocab_size(), self.model.limits().vocab_size);
        assert_eq!(n_words, vocab_size, "the constraint of another vocabulary");
        let of_rule = |keeping: &&Keeping| keeping.rule.id() == rule.id();
        let others = other.keeping.as_ref().filter(of_rule);
        let first = others.map_or_else(|| rule.first(other.tokens.len()), |keeping| keeping.first);
        if self.keeping.as_ref().filter(of_rule).is_none_or(|keeping| keeping.first != first) {
            let account = &self.caller.owner().account;
            let walk = match others {
                Some(others) => others.walk.fork_on(account)?,
                None => Walk::on(account)?,
            };
            self.keeping = Some(Keeping { rule: rule.clone(), first, walk: Arc::new(walk) });
        }
        // Not before it is paid for: what begins with a rule of its own begins elsewhere.
        self.rule = Some(rule.clone());
        Ok(())
    }

    /// Has worked out what a draw may give that is about to be asked for, for each of its places. Contexts of which this is
    /// asked before the first question is posted do not wait for each other.
    ///
    /// # Errors
    /// There is no host memory left for a matcher.
    pub fn foresee(&mut self, ask: &Ask) -> Result<(), EngineError> {
        let guess = match ask {
            Ask::Sample(_) => Guess::NOTHING,
            Ask::Verify { guess, .. } => guess.clone(),
            _ => return Ok(()),
        };
        if self.rule.is_some() && !self.tokens.is_empty() {
            self.foreseen = Some(self.look_ahead(guess)?);
        }
        Ok(())
    }

    fn look_ahead(&mut self, guess: Guess) -> Result<Foreseen, EngineError> {
        let (rule, first, walk) = self.keeping()?;
        let n_tokens = self.tokens.len();
        let tokens = self.tokens().copy_of(first.min(n_tokens)..n_tokens);
        let place = Place { rule, first, walk, n_tokens, tokens };
        let nexts = place.look_ahead(self.model.masks(), self.caller.owner(), guess.clone());
        Ok(Foreseen { n_tokens, guess, nexts })
    }

    /// As much of a guess as comes before the place where its constraint is complete; `None` where it is so now: a stream
    /// draws no end there.
    pub(super) async fn up_to_completion(&mut self, guess: Guess) -> Result<Option<Guess>, EngineError> {
        if self.rule.is_none() || self.tokens.is_empty() {
            return Ok(Some(guess));
        }
        let mut nexts = self.look_ahead(guess.clone())?.nexts.there().await?;
        for next in &mut nexts {
            *next = next.take().filter(|next| matches!(next, Next::Mask(_)));
        }
        if nexts[0].is_none() {
            return Ok(None);
        }
        let (guess, nexts) = guess.keep_places(nexts);
        let (n_tokens, nexts) = (self.tokens.len(), nexts.into_iter().map(Some).collect());
        self.foreseen = Some(Foreseen { n_tokens, guess: guess.clone(), nexts: Nexts::There(nexts) });
        Ok(Some(guess))
    }

    /// The rule that is kept to, from where on, and the matcher.
    fn keeping(&mut self) -> Result<(Arc<Rule>, usize, Arc<Walk>), BudgetExceeded> {
        let rule = self.rule.as_ref().expect("there is a rule");
        if self.keeping.as_ref().is_none_or(|keeping| keeping.rule.id() != rule.id()) {
            let walk = Arc::new(Walk::on(&self.caller.owner().account)?);
            let first = rule.first(self.tokens.len());
            self.keeping = Some(Keeping { rule: rule.clone(), first, walk });
        }
        let Keeping { rule, first, walk, .. } = self.keeping.as_ref().expect("it was made");
        Ok((rule.clone(), *first, walk.clone()))
    }

    /// The question with what its draws keep to.
    pub(super) async fn constrained(&mut self, ask: Ask) -> Result<Ask, EngineError> {
        let foreseen = self.foreseen.take();
        if self.rule.is_none() {
            return Ok(ask);
        }
        let guess = match &ask {
            Ask::Sample(_) => Guess::NOTHING,
            Ask::Verify { guess, .. } => guess.clone(),
            _ => return Ok(ask),
        };
        let fits = |foreseen: &Foreseen| foreseen.n_tokens == self.tokens.len() && foreseen.guess == guess;
        let foreseen = match foreseen.filter(fits) {
            Some(foreseen) => foreseen,
            None => self.look_ahead(guess.clone())?,
        };
        let nexts = foreseen.nexts.there().await?;
        let rule = self.rule.clone().expect("there is a rule");
        let vocab_size = self.model.limits().vocab_size;
        // What the grammar does not have cannot be drawn: it is not computed.
        let (guess, nexts) = guess.keep_places(nexts);
        let mut masks = nexts.into_iter().map(|next| mask_for(next, &rule, vocab_size));
        Ok(match ask {
            Ask::Sample(mut sampler) => {
                let mask = masks.next().expect("of the next place");
                let Sampler { program, mask: of_chain, .. } = Arc::make_mut(&mut sampler);
                match program {
                    Some(put_on) => put_on.within = Some(Arc::new(mask)),
                    None => *of_chain = Some(Arc::new(within(mask, of_chain.as_deref()))),
                }
                Ask::Sample(sampler)
            }
            Ask::Verify { sampler, .. } => {
                let masks = masks.map(|mask| Arc::new(within(mask, sampler.mask.as_deref()))).collect();
                Ask::Verify { sampler, guess: guess.under(masks) }
            }
            other => other,
        })
    }

    /// Whether what it draws keeps to anything.
    pub(super) fn keeps_to_a_rule(&self) -> bool {
        self.rule.is_some()
    }

    /// What hypotheses of a search over what comes after the context keep to.
    pub(super) fn keeping_of_search(&mut self) -> Result<Option<Keeping>, EngineError> {
        if self.rule.is_none() {
            return Ok(None);
        }
        self.keeping()?;
        Ok(self.keeping.as_ref().map(Keeping::fork).transpose()?)
    }

    /// What works out the masks of a run, from its first draw on.
    pub(super) fn masks_of_run(
        &mut self,
        sampler: &Sampler,
        foresight: Foresight,
    ) -> Result<Option<MasksOfRun>, EngineError> {
        if self.rule.is_none() {
            return Ok(None);
        }
        let (rule, first, walk) = self.keeping()?;
        let n_tokens = self.tokens.len();
        let tokens = self.tokens().copy_of(first.min(n_tokens)..n_tokens);
        let sampler_mask = if sampler.program.is_some() { None } else { sampler.mask.clone() };
        let owner = self.caller.owner().clone();
        Ok(Some(MasksOfRun { rule, first, walk, sampler_mask, n_tokens, tokens, foresight, owner }))
    }
}

/// The mask of one draw by itself: where nothing but the end may come, that; after it, nothing.
fn mask_for(next: Next, rule: &Rule, vocab_size: usize) -> TokenMask {
    match next {
        Next::Mask(mask) => mask,
        Next::Complete => {
            let mut mask = TokenMask::none(vocab_size);
            rule.constraint().ends().iter().for_each(|&token| mask.set(token, true));
            mask
        }
        Next::Ended => TokenMask::none(vocab_size),
    }
}

pub(super) fn within(mask: TokenMask, other: Option<&TokenMask>) -> TokenMask {
    match other {
        Some(other) => mask.and(other),
        None => mask,
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::account::{Account, ActorId, Budget, GuestId, Resource, SessionId};
    use crate::constraint::{Begins, Constraint, ConstraintLimits, Grammar, Vocabulary};
    use crate::model::{Model, ModelSource, SpecialTokens};

    /// A way of some seconds, through a grammar that goes on in many ways after every token.
    const N_TOKENS: usize = 6_000;
    const N_WAYS: usize = 400;

    #[test]
    fn a_matcher_goes_no_further_once_nobody_waits_for_it() {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/tiny");
        let model = Model::open("tiny", &ModelSource::Folder(folder)).expect("the bundled model opens");
        let model = Arc::new(model);
        let vocabulary = Arc::new(Vocabulary::of(&model).expect("it is small"));
        let token = model.tokenizer.encode("x", SpecialTokens::Parse).expect("it has bytes")[0];
        let names: Vec<String> = (0..N_WAYS).map(|n| format!("r{n}")).collect();
        let rules: String = names.iter().map(|name| format!("\n{name}: {name} \"x\" | \"x\"")).collect();
        let grammar = Grammar::Lark(format!("start: {}{rules}", names.join(" | ")));
        let account = Account::new("guest", Budget::UNLIMITED, None);
        let limits = ConstraintLimits::default();
        let constraint = Constraint::over(&grammar, &model, vocabulary, limits, &account);
        let rule = Arc::new(Rule::new(Arc::new(constraint.expect("a grammar")), Begins::FirstDraw));
        let walk = Arc::new(Walk::on(&account).expect("there is memory"));
        let owner = Owner { actor: ActorId(1), session: SessionId(1), guest: GuestId(1), account };
        let masks = MaskThreads::default();
        let tokens = vec![token; N_TOKENS];
        let place = Place { rule, first: 0, walk: walk.clone(), n_tokens: N_TOKENS, tokens };
        let nexts = place.look_ahead(&masks, &owner, Guess::NOTHING);
        // It is on its way.
        let (begun, used) = (Instant::now(), owner.account.used(Resource::HostBytes));
        while owner.account.used(Resource::HostBytes) <= used {
            assert!(begun.elapsed() < Duration::from_secs(60), "it begins");
            thread::sleep(Duration::from_millis(1));
        }
        drop(nexts);
        while Arc::strong_count(&walk) > 1 {
            assert!(begun.elapsed() < Duration::from_secs(60), "it ends");
            thread::sleep(Duration::from_millis(1));
        }
        // At least two items of 8 bytes for each way, had it gone to the end.
        let used = owner.account.used(Resource::HostBytes);
        assert!(used < (N_TOKENS * N_WAYS * 2 * 8) as u64, "{used}");
    }
}
