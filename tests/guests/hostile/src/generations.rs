//! Generations that are handed over as they end: what they come to is what they come to all at once.

use trellis_guest::{
    Completion, Context, Ended, Error, FinishReason, Generate, Guesses, Model, Sampler, Steering,
    generate_all, generate_each, seed,
};

use crate::Outcome;

/// How many generations there are of each kind.
const N: usize = 4;

pub(crate) fn handed_over(model: &Model, prompt: &Context) -> Outcome {
    let sampler = Sampler::seeded(seed()).temperature(1.3).build()?;
    let draft = Model::open("draft")?;
    let before = prompt.fork()?.generate(&sampler).seed(seed()).stop_tokens(&[]).max_tokens(30).run()?;
    let stop: String = before.text.chars().skip(6).take(3).collect();
    let sets = |_| (0..3).map(|_| forks(prompt)).collect::<Result<Vec<_>, _>>();
    let sets = (0..5).map(sets).collect::<Result<Vec<_>, _>>()?;
    let plain = |fork, idx: usize| request(fork, &sampler, idx);
    compare(prompt, &sets[0], plain)?;
    compare(prompt, &sets[1], |fork, idx| plain(fork, idx).stop_at(&stop).keep_text_only())?;
    compare(prompt, &sets[2], |fork, idx| plain(fork, idx).guess_by(Guesses::lookup()))?;
    compare(prompt, &sets[3], |fork, idx| plain(fork, idx).guess_by(Guesses::draft(&draft)))?;
    compare(prompt, &sets[4], |fork, idx| plain(fork, idx).top(2))?;
    given_up(model, prompt, &sampler)
}

fn forks(prompt: &Context) -> Result<Vec<Context>, Error> {
    (0..N).map(|_| prompt.fork()).collect()
}

/// Lengths that differ, so that they do not end together.
fn request<'a>(fork: &'a Context, sampler: &'a Sampler, idx: usize) -> Generate<'a> {
    fork.generate(sampler).seed(seed() ^ idx as u64).stop_tokens(&[]).max_tokens(30 - 7 * idx as u32)
}

/// The same requests all at once, one after the other as they end, and in pieces.
fn compare<'a>(
    prompt: &Context,
    sets: &'a [Vec<Context>],
    request: impl Fn(&'a Context, usize) -> Generate<'a>,
) -> Outcome {
    let requests = |set: usize| sets[set].iter().enumerate().map(|(idx, fork)| request(fork, idx));
    let kept =
        |set: usize| sets[set].iter().map(|context| context.tokens_from(prompt.length())).collect::<Vec<_>>();
    let expected = generate_all(requests(0))?;

    let mut all = generate_each(requests(1))?;
    let ended: Vec<Ended> = all.by_ref().collect();
    assert_eq!(in_order(ended)?, expected);
    assert!(all.next().is_none() && all.reach(1000).is_empty());
    assert!(all.progress().iter().zip(&expected).all(|(progress, one)| {
        progress.is_over
            && progress.n_tokens as usize == one.tokens.len()
            && progress.logprob == one.logprob()
    }));

    let mut all = generate_each(requests(2))?;
    let mut ended = Vec::new();
    for n_tokens in (0..=30).step_by(3) {
        ended.extend(all.reach(n_tokens));
        let progress = all.progress();
        assert!(progress.iter().all(|one| one.is_over || one.n_tokens >= n_tokens), "{progress:?}");
    }
    ended.extend(all.by_ref());
    assert_eq!(in_order(ended)?, expected);
    assert!(kept(0) == kept(1) && kept(0) == kept(2));
    Ok(())
}

fn in_order(mut ended: Vec<Ended>) -> Result<Vec<Completion>, Error> {
    ended.sort_by_key(|one| one.idx);
    assert!(ended.iter().enumerate().all(|(idx, one)| one.idx == idx), "each once");
    ended.into_iter().map(|one| one.completion).collect()
}

/// What is ended has what it had, what is changed fails, what is dropped lets go of its contexts.
fn given_up(model: &Model, prompt: &Context, sampler: &Sampler) -> Outcome {
    let forks = forks(prompt)?;
    let long = |idx: usize| forks[idx].generate(sampler).seed(idx as u64).stop_tokens(&[]).max_tokens(200);
    let mut all = generate_each((0..N).map(long))?;
    assert!(all.reach(5).is_empty());
    let cancelled = all.cancel(1)?;
    assert_eq!((cancelled.finish, cancelled.is_finished()), (FinishReason::Cancelled, false));
    assert!(cancelled.tokens.len() >= 5 && cancelled.text == model.decode(&cancelled.tokens)?);
    assert_eq!(forks[1].tokens_from(prompt.length()), cancelled.tokens);
    for idx in [1, N, usize::MAX] {
        let refused = all.cancel(idx);
        assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{refused:?}");
    }
    // It is the guest's again; the others go on.
    let next = forks[1].step(sampler)?;
    assert_eq!(forks[1].tokens_from(prompt.length()), [&cancelled.tokens[..], &[next.token]].concat());
    assert!(all.reach(9).is_empty());

    forks[2].append(&[100])?;
    let width = model.info().hidden_size as usize;
    forks[3].steer(&Steering::none().and(0, vec![1.0; width]), 0)?;
    let failed = all.reach(12);
    let is_refused = |one: &Ended| matches!(one.completion, Err(Error::InvalidArgument { .. }));
    assert!(failed.iter().all(is_refused) && failed.iter().map(|one| one.idx).eq([2, 3]), "{failed:?}");
    let so_far: Vec<_> = all.progress().iter().map(|one| one.n_tokens as usize).collect();
    drop(all);
    assert_eq!(forks[0].tokens_from(prompt.length()).len(), so_far[0]);
    forks[0].step(sampler)?;
    // One context twice, and one that is empty.
    let twice = generate_each([long(0), long(0)]).map(drop);
    assert!(matches!(twice, Err(Error::InvalidArgument { .. })), "{twice:?}");
    let empty = model.context()?;
    let refused = generate_each([empty.generate(sampler)]).map(drop);
    assert!(matches!(refused, Err(Error::EmptyContext)), "{refused:?}");
    assert!(generate_each([])?.next().is_none());
    Ok(())
}
