//! A constraint and where it begins, and what is kept of it for one context.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::walker::{Left, Next, WALK_BYTES, Walker};
use super::{Begins, Constraint, ConstraintError};
use crate::account::{Account, BudgetExceeded, HostCharge};
use crate::batch::Token;
use crate::guess::GuessTree;
use crate::sampling::TokenMask;

/// Tells rules apart: one that is made anew begins anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RuleId(u64);

/// A constraint that contexts keep to from a place on.
#[derive(Debug)]
pub struct Rule {
    id: RuleId,
    constraint: Arc<Constraint>,
    begins: Begins,
    /// What may come before it begins.
    all: Arc<TokenMask>,
    /// How many of the tokens that its masks nearly forced were drawn, lately: the bits of a number from 0 to 1.
    trust: AtomicU32,
}

/// Of a rule that nothing is known of.
const TRUST_FIRST: f32 = 0.9;
/// Below it nothing is computed for a token that is only nearly forced.
const TRUST_LEAST: f32 = 0.75;
/// The share of one draw in it.
const TRUST_WEIGHT: f32 = 0.25;

impl Rule {
    /// A rule of its own: a context that kept to another one with the same constraint begins anew.
    #[must_use]
    pub fn new(constraint: Arc<Constraint>, begins: Begins) -> Self {
        static N_RULES: AtomicU64 = AtomicU64::new(0);
        let id = RuleId(N_RULES.fetch_add(1, Ordering::Relaxed));
        let all = Arc::new(TokenMask::all(constraint.vocab_size()));
        let trust = AtomicU32::new(TRUST_FIRST.to_bits());
        Self { id, constraint, begins, all, trust }
    }

    /// The constraint.
    #[must_use]
    pub fn constraint(&self) -> &Arc<Constraint> {
        &self.constraint
    }

    fn trust(&self) -> f32 {
        f32::from_bits(self.trust.load(Ordering::Relaxed))
    }

    /// Whether tokens that masks nearly force are drawn mostly.
    pub(crate) fn trusts(&self) -> bool {
        self.trust() >= TRUST_LEAST
    }

    /// Whether such a token was drawn. Of two at once one may be lost, which changes nothing but what is guessed.
    pub(crate) fn note_nearly_forced(&self, was_drawn: bool) {
        let trust = self.trust();
        let trust = trust + TRUST_WEIGHT * (f32::from(u8::from(was_drawn)) - trust);
        self.trust.store(trust.to_bits(), Ordering::Relaxed);
    }

    pub(crate) fn id(&self) -> RuleId {
        self.id
    }

    /// From where on tokens count, of a context of `n_tokens` that draws under the rule for the first time.
    pub(crate) fn first(&self, n_tokens: usize) -> usize {
        if let Begins::At(position) = self.begins { position } else { n_tokens }
    }
}

/// What a context keeps of a rule: a matcher, which stands somewhere in its tokens. Never wrong, whatever becomes of those.
/// Nobody pays for the default, which is of no context.
#[derive(Debug, Default)]
pub(crate) struct Walk {
    walker: Mutex<Option<Box<Walker>>>,
    /// That of the context of which it was forked: where its matcher stands is near.
    parent: Mutex<Option<Arc<Walk>>>,
    /// For the first bytes of the matcher, also before there is one; it has the rest on its own.
    charge: Option<HostCharge>,
}

/// Where the grammar begins in tokens that are so many, up to this position, if it has begun. It is looked for from their beginning, once
/// for whoever comes near and asks what is next.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Begun {
    position: usize,
    n_tokens: usize,
    n_before: Option<usize>,
}

impl std::fmt::Debug for Walker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Walker").finish_non_exhaustive()
    }
}

impl Walk {
    /// One that has not been used, which this account pays for.
    ///
    /// # Errors
    /// There is no host memory left for it.
    pub(crate) fn on(account: &Arc<Account>) -> Result<Self, BudgetExceeded> {
        Ok(Self { charge: Some(HostCharge::new(account, WALK_BYTES)?), ..Self::default() })
    }

    /// That of a fork, for which pays who pays for this one.
    ///
    /// # Errors
    /// There is no host memory left for it.
    pub(crate) fn fork(self: &Arc<Self>) -> Result<Self, BudgetExceeded> {
        Ok(self.fork_with(self.charge.as_ref().map(HostCharge::again).transpose()?))
    }

    /// That of a fork, which this account pays for.
    ///
    /// # Errors
    /// There is no host memory left for it.
    pub(crate) fn fork_on(self: &Arc<Self>, account: &Arc<Account>) -> Result<Self, BudgetExceeded> {
        Ok(self.fork_with(Some(HostCharge::new(account, WALK_BYTES)?)))
    }

    fn fork_with(self: &Arc<Self>, charge: Option<HostCharge>) -> Self {
        let parent = self.parent().clone();
        // One that has not been used leads to nothing.
        let parent = if parent.is_some() { parent } else { Some(self.clone()) };
        Self { parent: Mutex::new(parent), charge, ..Self::default() }
    }

    fn parent(&self) -> std::sync::MutexGuard<'_, Option<Arc<Self>>> {
        self.parent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What may come after the `n_tokens` tokens of a context, of which those from position `first` on are given, and after
    /// each of the guessed ones that follow, as far as the rule allows them and that can be worked out: a draw that comes so far
    /// finds the error for itself. Takes as long as the limits of the grammar say.
    ///
    /// # Errors
    /// The tokens have left the grammar, or its limits were reached.
    pub(crate) fn next(
        &self,
        rule: &Rule,
        first: usize,
        n_tokens: usize,
        tokens: &[Token],
        guess: &[Token],
        begun: Option<Begun>,
    ) -> Result<Vec<Next>, ConstraintError> {
        self.walked(rule, |walker| nexts(walker, rule, first, n_tokens, tokens, guess, begun))
    }

    /// Goes on to the end of the tokens of a context, as long as it has time, and takes in at least one that is left. Where it
    /// is there, [`Self::next`] of the same tokens, with what this gives, has little to do.
    ///
    /// # Errors
    /// The limits of the grammar were reached, or there is no host memory left.
    pub(crate) fn come_near(
        &self,
        rule: &Rule,
        first: usize,
        n_tokens: usize,
        tokens: &[Token],
        is_over: &mut dyn FnMut() -> bool,
    ) -> Result<Option<Begun>, ConstraintError> {
        let n_before = n_before(rule, first, n_tokens, tokens);
        let is_there = match n_before {
            Some(n_before) => self.walked(rule, |walker| walker.come_near(&tokens[n_before..], is_over))?,
            None => true,
        };
        Ok(is_there.then_some(Begun { position: n_tokens, n_tokens: tokens.len(), n_before }))
    }

    /// As [`Self::next`], after the context and then after each node of a tree; none where the rule does not allow the node, or
    /// one that it follows.
    ///
    /// # Errors
    /// As for [`Self::next`].
    pub(crate) fn next_in_tree(
        &self,
        rule: &Rule,
        first: usize,
        n_tokens: usize,
        tokens: &[Token],
        tree: &GuessTree,
        begun: Option<Begun>,
    ) -> Result<Vec<Option<Next>>, ConstraintError> {
        self.walked(rule, |walker| {
            let mut found: Vec<Option<Next>> = Vec::with_capacity(tree.n_nodes() + 1);
            found.push(nexts(walker, rule, first, n_tokens, tokens, &[], begun)?.pop());
            for node in 0..tree.n_nodes() {
                let is_refused = |parent: usize| found[parent + 1].is_none();
                if tree.parent(node).is_some_and(is_refused) {
                    found.push(None);
                    continue;
                }
                let path = tree.path(node);
                let n_not_counted = first.saturating_sub(n_tokens).min(path.len());
                let with_path = [tokens, &path[n_not_counted..]].concat();
                let next = match next_at(walker, rule, first, n_tokens + path.len(), &with_path, None) {
                    Ok(Ok(Next::Ended) | Err(Left(_))) => None,
                    Ok(Ok(next)) => Some(next),
                    Err(_) => {
                        walker.begin_anew();
                        None
                    }
                };
                found.push(next);
            }
            Ok(found)
        })
    }

    fn walked<T>(
        &self,
        rule: &Rule,
        walk: impl FnOnce(&mut Walker) -> Result<T, ConstraintError>,
    ) -> Result<T, ConstraintError> {
        let mut held = self.walker.lock().unwrap_or_else(PoisonError::into_inner);
        let mut walker = match held.take() {
            Some(walker) => walker,
            None => self.walker(rule)?,
        };
        let found = walk(&mut walker)?;
        // After an error the next one begins with a new matcher.
        *held = Some(walker);
        Ok(found)
    }

    /// A matcher to begin with.
    fn walker(&self, rule: &Rule) -> Result<Box<Walker>, BudgetExceeded> {
        let charge = self.charge.as_ref().map(HostCharge::beside);
        let parent = self.parent().take();
        if let Some(parent) = parent {
            let held = parent.walker.lock().unwrap_or_else(PoisonError::into_inner);
            if let Some(near) = &*held {
                return Ok(Box::new(near.fork(charge)?));
            }
        }
        Ok(Box::new(Walker::new(rule.constraint.clone(), charge)))
    }
}

fn nexts(
    walker: &mut Walker,
    rule: &Rule,
    first: usize,
    n_tokens: usize,
    tokens: &[Token],
    guess: &[Token],
    begun: Option<Begun>,
) -> Result<Vec<Next>, ConstraintError> {
    let mut nexts = Vec::with_capacity(guess.len() + 1);
    let with_guess: Vec<Token>;
    let (n_given, tokens) = match guess {
        [] => (tokens.len(), tokens),
        _ => {
            let n_not_counted = first.saturating_sub(n_tokens).min(guess.len());
            with_guess = [tokens, &guess[n_not_counted..]].concat();
            (tokens.len(), &*with_guess)
        }
    };
    for n_guessed in 0..=guess.len() {
        let position = n_tokens + n_guessed;
        let tokens = &tokens[..n_given + position.saturating_sub(first.max(n_tokens))];
        match next_at(walker, rule, first, position, tokens, begun) {
            Ok(Ok(next)) => nexts.push(next),
            // What was guessed is cut there; the place before it has its mask.
            Ok(Err(Left(_))) if n_guessed > 0 => break,
            // It stands where it should, and nobody pays for it to go on.
            Err(ConstraintError::Budget(_)) if n_guessed > 0 => break,
            Err(_) if n_guessed > 0 => {
                walker.begin_anew();
                break;
            }
            Err(error) => return Err(error),
            Ok(Err(Left(idx))) => {
                return Err(ConstraintError::Left { position: first + idx, token: tokens[idx] });
            }
        }
        if nexts.last() == Some(&Next::Ended) && n_guessed > 0 {
            nexts.pop();
            break;
        }
    }
    Ok(nexts)
}

/// What may come at a position, after the tokens from `first` on.
fn next_at(
    walker: &mut Walker,
    rule: &Rule,
    first: usize,
    position: usize,
    tokens: &[Token],
    begun: Option<Begun>,
) -> Result<Result<Next, Left>, ConstraintError> {
    let begun = begun.filter(|begun| (begun.position, begun.n_tokens) == (position, tokens.len()));
    let n_before = begun.map_or_else(|| n_before(rule, first, position, tokens), |begun| begun.n_before);
    let Some(n_before) = n_before else {
        return Ok(Ok(Next::Mask(TokenMask::clone(&rule.all))));
    };
    match walker.seek(&tokens[n_before..])? {
        Ok(()) => walker.next().map(Ok),
        Err(Left(idx)) => Ok(Err(Left(n_before + idx))),
    }
}

/// How many of the tokens from `first` on come before the grammar; `None` where it has not begun at this position.
fn n_before(rule: &Rule, first: usize, position: usize, tokens: &[Token]) -> Option<usize> {
    rule.begins.n_before(tokens, rule.constraint.tokenizer()).filter(|_| position >= first)
}
