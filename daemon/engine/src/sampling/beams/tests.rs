//! The search against both of its sources, written out plainly over whole rows, and against all texts of a small model.

use super::*;
use crate::batch::Candidate;

const STOP: Token = 0;

fn settings(n_beams: usize, length_penalty: f64, early_stopping: EarlyStopping) -> BeamSettings {
    let (n_groups, diversity_penalty, n_tokens_max, stop_tokens) = (1, 0.0, 5, vec![STOP]);
    BeamSettings {
        n_beams,
        n_groups,
        diversity_penalty,
        length_penalty,
        early_stopping,
        n_tokens_max,
        stop_tokens,
    }
}

/// Log-probabilities of `[stop, 1, 2]` after a text.
type TinyModel = fn(&[Token]) -> Vec<f32>;

/// A model whose next token depends on the last one.
fn three_tokens(text: &[Token]) -> Vec<f32> {
    let probabilities: [f32; 3] = match text.last() {
        None => [0.1, 0.5, 0.4],
        Some(1) => [0.3, 0.1, 0.6],
        _ => [0.45, 0.35, 0.2],
    };
    probabilities.map(f32::ln).to_vec()
}

/// A model of 40 tokens whose probabilities are of all magnitudes.
fn forty_tokens(text: &[Token]) -> Vec<f32> {
    let mut state = text.iter().fold(0x9E37_79B9_7F4A_7C15_u64, |h, &token| {
        (h ^ u64::from(token + 1)).wrapping_mul(0x0100_0000_01B3).rotate_left(29)
    });
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 24) as f32
    };
    let logits: Vec<f32> = (0..40).map(|_| 5.0 * next()).collect();
    let sum = logits.iter().map(|logit| logit.exp()).sum::<f32>().ln();
    logits.into_iter().map(|logit| logit - sum).collect()
}

fn top(row: &[f32], n: usize) -> Vec<Candidate> {
    let candidate = |(token, &logprob): (usize, &f32)| Candidate { token: token as Token, logprob };
    let mut top: Vec<Candidate> = row.iter().enumerate().map(candidate).collect();
    top.sort_by(|a, b| b.logprob.total_cmp(&a.logprob).then(a.token.cmp(&b.token)));
    top.truncate(n);
    top
}

/// Texts of the rows: contexts as the engine has them.
fn texts_of(rows: &[&Row], before: &[Vec<Token>]) -> Vec<Vec<Token>> {
    let text = |row: &&Row| {
        let parent = row.parent.map_or([].as_slice(), |parent| &before[parent]);
        [parent, &row.appended].concat()
    };
    rows.iter().map(text).collect()
}

fn step(search: &mut Search, model: TinyModel, texts: &mut Vec<Vec<Token>>) {
    *texts = texts_of(&search.rows(), texts);
    let rows: Vec<Vec<f32>> = texts.iter().map(|text| model(text)).collect();
    let tops: Vec<Vec<Candidate>> = rows.iter().map(|row| top(row, search.n_top(row.len()))).collect();
    search.advance(&tops.iter().map(Vec::as_slice).collect::<Vec<_>>());
}

fn run(settings: &BeamSettings, model: TinyModel) -> Search {
    let (mut search, mut texts) = (Search::new(settings.clone()), Vec::new());
    while !search.is_over() {
        step(&mut search, model, &mut texts);
        for (idx, live) in search.live().enumerate() {
            let tokens = search.tokens(idx);
            assert_eq!((tokens.len(), tokens.last().copied()), (live.n_tokens, live.token));
        }
    }
    search
}

fn pairs(found: Vec<Finished>) -> Vec<(Vec<Token>, f32)> {
    found.into_iter().map(|finished| (finished.tokens, finished.score)).collect()
}

/// `_beam_search` of transformers 5, over whole rows.
fn one_group(settings: &BeamSettings, model: TinyModel) -> Vec<(Vec<Token>, f32)> {
    let n = settings.n_beams;
    let mut running: Vec<(Vec<Token>, f32)> = vec![(Vec::new(), 0.0)];
    let mut finished: Vec<(Vec<Token>, f32)> = Vec::new();
    for n_tokens in 1.. {
        let mut all: Vec<(Vec<Token>, f32)> = Vec::new();
        for (text, so_far) in &running {
            for candidate in top(&model(text), usize::MAX) {
                all.push(([text.as_slice(), &[candidate.token]].concat(), so_far + candidate.logprob));
            }
        }
        all.sort_by(|a, b| b.1.total_cmp(&a.1));
        all.truncate(n * (1 + settings.stop_tokens.len()).max(2));
        let ends = |text: &[Token]| n_tokens == settings.n_tokens_max || text.ends_with(&[STOP]);
        let ended = all[..n.min(all.len())].iter().filter(|(text, _)| ends(text));
        finished.extend(ended.map(|(text, sum)| (text.clone(), settings.score(*sum, n_tokens))));
        finished.sort_by(|a, b| b.1.total_cmp(&a.1));
        finished.truncate(n);
        running = all.into_iter().filter(|(text, _)| !ends(text)).take(n).collect();
        let Some((_, best)) = running.first() else { break };
        let n_tokens_best = match settings.early_stopping {
            EarlyStopping::Never if settings.length_penalty > 0.0 => settings.n_tokens_max,
            _ => n_tokens,
        };
        let is_full = finished.len() == n;
        let is_behind = || settings.score(*best, n_tokens_best) <= finished[n - 1].1;
        if is_full && (settings.early_stopping == EarlyStopping::AtOnce || is_behind()) {
            break;
        }
    }
    finished
}

/// `_group_beam_search` of transformers before 4.55, over whole rows.
fn groups(settings: &BeamSettings, model: TinyModel) -> Vec<(Vec<Token>, f32)> {
    struct Group {
        beams: Vec<(Vec<Token>, f32)>,
        hypotheses: Vec<(Vec<Token>, f32)>,
        is_done: bool,
    }
    let n = settings.n_group_beams();
    let group = |_| Group { beams: vec![(Vec::new(), 0.0)], hypotheses: Vec::new(), is_done: false };
    let mut groups: Vec<Group> = (0..settings.n_groups).map(group).collect();
    let add = |group: &mut Group, text: Vec<Token>, sum: f32| {
        let score = settings.score(sum, text.len());
        group.hypotheses.push((text, score));
        group.hypotheses.sort_by(|a, b| b.1.total_cmp(&a.1));
        group.hypotheses.truncate(n);
    };
    for n_tokens in 1..=settings.n_tokens_max {
        let mut current: Vec<Token> = Vec::new();
        for group in groups.iter_mut().filter(|group| !group.is_done) {
            let mut all: Vec<(Vec<Token>, f32)> = Vec::new();
            for (text, so_far) in &group.beams {
                for (token, logprob) in model(text).into_iter().enumerate() {
                    let n_taken = current.iter().filter(|&&taken| taken as usize == token).count();
                    let logprob = logprob - settings.diversity_penalty * n_taken as f32;
                    all.push(([text.as_slice(), &[token as Token]].concat(), so_far + logprob));
                }
            }
            all.sort_by(|a, b| b.1.total_cmp(&a.1));
            all.truncate(n * (1 + settings.stop_tokens.len()).max(2));
            let best = all[0].1;
            let mut beams = Vec::new();
            for (rank, (text, sum)) in all.into_iter().enumerate() {
                if text.ends_with(&[STOP]) {
                    if rank < n {
                        add(group, text, sum);
                    }
                } else {
                    beams.push((text, sum));
                    if beams.len() == n {
                        break;
                    }
                }
            }
            group.beams = beams;
            current.extend(group.beams.iter().map(|(text, _)| *text.last().expect("it has a token")));
            let n_tokens_best = match settings.early_stopping {
                EarlyStopping::Never if settings.length_penalty > 0.0 => settings.n_tokens_max,
                _ => n_tokens,
            };
            group.is_done = group.hypotheses.len() == n
                && (settings.early_stopping == EarlyStopping::AtOnce
                    || group.hypotheses[n - 1].1 >= settings.score(best, n_tokens_best));
        }
        if groups.iter().all(|group| group.is_done) {
            break;
        }
    }
    for group in groups.iter_mut().filter(|group| !group.is_done) {
        for (text, sum) in std::mem::take(&mut group.beams) {
            add(group, text, sum);
        }
    }
    let mut all: Vec<(Vec<Token>, f32)> = groups.into_iter().flat_map(|group| group.hypotheses).collect();
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    all
}

const EARLY: [EarlyStopping; 3] = [EarlyStopping::Heuristic, EarlyStopping::AtOnce, EarlyStopping::Never];

#[test]
fn one_group_is_what_transformers_5_finds() {
    for early_stopping in EARLY {
        for length_penalty in [-0.5, 0.0, 0.6, 1.0, 2.0] {
            for n_beams in [1, 2, 3, 7, 16] {
                for n_tokens_max in [1, 2, 6] {
                    let plain = settings(n_beams, length_penalty, early_stopping);
                    let plain = BeamSettings { n_tokens_max, ..plain };
                    for model in [three_tokens, forty_tokens] {
                        let found = pairs(run(&plain, model).best(n_beams));
                        assert_eq!(found, one_group(&plain, model), "{plain:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn groups_are_what_earlier_transformers_find() {
    for early_stopping in EARLY {
        for length_penalty in [0.0, 0.6, 1.0, 2.0] {
            for (n_beams, n_groups) in [(2, 2), (4, 2), (6, 3), (6, 2), (8, 8)] {
                for diversity_penalty in [0.0, 0.4, 1.5, 20.0] {
                    for n_tokens_max in [1, 3, 12] {
                        let plain = settings(n_beams, length_penalty, early_stopping);
                        let diverse = BeamSettings { n_groups, diversity_penalty, n_tokens_max, ..plain };
                        let found = pairs(run(&diverse, forty_tokens).best(n_beams));
                        assert_eq!(found, groups(&diverse, forty_tokens), "{diverse:?}");
                    }
                }
            }
        }
    }
}

/// All texts of the small model with their scores, best first.
fn enumerate(settings: &BeamSettings) -> Vec<(Vec<Token>, f32)> {
    let mut open = vec![(Vec::new(), 0.0f32)];
    let mut closed = Vec::new();
    while let Some((tokens, sum)) = open.pop() {
        for (token, logprob) in three_tokens(&tokens).into_iter().enumerate() {
            let extended = [tokens.as_slice(), &[token as Token]].concat();
            if extended.ends_with(&[STOP]) || extended.len() == settings.n_tokens_max {
                let score = settings.score(sum + logprob, extended.len());
                closed.push((extended, score));
            } else {
                open.push((extended, sum + logprob));
            }
        }
    }
    closed.sort_by(|a, b| b.1.total_cmp(&a.1));
    closed
}

#[test]
fn as_many_beams_as_texts_find_the_best_texts() {
    for length_penalty in [0.0, 0.6, 1.0, 2.0] {
        let all = enumerate(&settings(1, length_penalty, EarlyStopping::Never));
        let found =
            pairs(run(&settings(all.len(), length_penalty, EarlyStopping::Never), three_tokens).best(9));
        let scores = |texts: &[(Vec<Token>, f32)]| texts.iter().map(|text| text.1).collect::<Vec<_>>();
        assert_eq!(scores(&found), scores(&all[..9]), "length penalty {length_penalty}");
        assert_eq!(found[0].0, all[0].0);
    }
}

#[test]
fn what_is_settled_begins_all_that_live_and_the_best() {
    for seed in 0..40 {
        let model: TinyModel = if seed % 2 == 0 { forty_tokens } else { three_tokens };
        let plain = settings(1 + seed / 10, 1.0, EarlyStopping::Never);
        let plain = BeamSettings { n_tokens_max: 4 + seed, ..plain };
        let (mut search, mut texts) = (Search::new(plain), Vec::new());
        let mut settled = Vec::new();
        while !search.is_over() {
            step(&mut search, model, &mut texts);
            let now = search.settled();
            assert!(now.starts_with(&settled), "what is settled stays");
            settled = now;
        }
        assert_eq!(search.settled(), search.best(1)[0].tokens, "at the end all is");
    }
}

#[test]
fn what_is_kept_lives_in_its_place() {
    let plain = BeamSettings { n_tokens_max: 9, ..settings(4, 1.0, EarlyStopping::Never) };
    let (mut search, mut texts) = (Search::new(plain), Vec::new());
    step(&mut search, forty_tokens, &mut texts);
    step(&mut search, forty_tokens, &mut texts);
    let live: Vec<Vec<Token>> = (0..4).map(|idx| search.tokens(idx)).collect();
    let kept = |from, tokens: &[Token], logprob| Kept { from, tokens: tokens.to_vec(), logprob };
    search
        .keep(&[kept(Some(2), &[], -3.0), kept(Some(0), &[7, 8], -1.0), kept(None, &[5], -2.0)], 40)
        .expect("in order");
    let now: Vec<Vec<Token>> = (0..3).map(|idx| search.tokens(idx)).collect();
    let expected = [[live[0].as_slice(), &[7, 8]].concat(), vec![5], live[2].clone()];
    assert_eq!(now, expected, "the best first");
    assert_eq!(texts_of(&search.rows(), &texts), expected, "and so do the rows");
    let mut without_rows = search.clone();
    without_rows.forget_rows();
    assert_eq!(texts_of(&without_rows.rows(), &[]), expected);
    step(&mut search, forty_tokens, &mut texts);
    assert!(search.live().all(|live| live.parent_idx.is_some()));

    let before = search.clone();
    let nine = [1; 9];
    for (wrong, name) in [
        (kept(Some(4), &[], 0.0), "from"),
        (kept(None, &nine, 0.0), "tokens"),
        (kept(None, &[], f32::NAN), "logprob"),
    ] {
        match search.keep(&[wrong], 40) {
            Err(SamplerError::OutOfRange { name: found, .. }) => assert_eq!(found, name),
            other => panic!("{name}: {other:?}"),
        }
    }
    let token = search.keep(&[kept(None, &[40], 0.0)], 40);
    assert!(matches!(token, Err(SamplerError::TokenOutOfRange { token: 40, vocab_size: 40 })));
    let many = vec![kept(Some(0), &[], -1.0); 5];
    assert!(search.keep(&many, 40).is_err(), "more than beams");
    assert_eq!(search.live().collect::<Vec<_>>(), before.live().collect::<Vec<_>>(), "nothing has changed");
}

#[test]
fn tokens_of_what_is_gone_are_forgotten() {
    let stop_tokens = Vec::new();
    let plain = BeamSettings { n_tokens_max: 30, stop_tokens, ..settings(3, 1.0, EarlyStopping::Never) };
    let n_bytes_max = Search::n_bytes_max(&plain);
    let (mut search, mut texts) = (Search::new(plain), Vec::new());
    for _ in 0..100 {
        step(&mut search, forty_tokens, &mut texts);
        // Back to near the beginning, so that it never ends.
        let kept = [3, 5, 27].map(|n| Kept { from: None, tokens: vec![9; n], logprob: -1.0 });
        search.keep(&kept, 40).expect("in order");
        assert!(search.n_bytes() <= n_bytes_max);
        assert_eq!(search.tokens(2).len() + search.tokens(0).len(), 30);
    }
}

#[test]
fn rows_with_nothing_to_come_end() {
    let mut search = Search::new(settings(4, 1.0, EarlyStopping::Heuristic));
    let impossible = Candidate { token: 2, logprob: f32::NEG_INFINITY };
    search.advance(&[&[Candidate { token: 1, logprob: -1.0 }, impossible]]);
    assert_eq!(search.live().len(), 1, "what is impossible is not taken");
    search.advance(&[&[]]);
    assert!(search.is_over() && search.best(4).is_empty());
}

#[test]
fn settings_are_checked() {
    let plain = settings(4, 1.0, EarlyStopping::Heuristic);
    plain.validate(40).expect("in order");
    for (wrong, name) in [
        (BeamSettings { n_beams: 0, ..plain.clone() }, "n-beams"),
        (BeamSettings { n_beams: 513, ..plain.clone() }, "n-beams"),
        (BeamSettings { diversity_penalty: -0.1, ..plain.clone() }, "diversity-penalty"),
        (BeamSettings { length_penalty: f64::NAN, ..plain.clone() }, "length-penalty"),
        (BeamSettings { n_tokens_max: 0, ..plain.clone() }, "max-tokens"),
    ] {
        let refused = wrong.validate(40);
        assert!(matches!(refused, Err(SamplerError::OutOfRange { name: found, .. }) if found == name));
    }
    for n_groups in [0, 3] {
        let error =
            BeamSettings { n_groups, ..plain.clone() }.validate(40).expect_err("4 beams have no such groups");
        let expected = format!("n-groups is {n_groups}, expected a divisor of n-beams, which is 4");
        assert_eq!(error.to_string(), expected);
    }
    let many = BeamSettings { stop_tokens: vec![0; 257], ..plain.clone() };
    assert!(matches!(many.validate(40), Err(SamplerError::TooMany { n: 257, .. })));
    let outside = BeamSettings { stop_tokens: vec![40], ..plain };
    assert!(matches!(outside.validate(40), Err(SamplerError::TokenOutOfRange { token: 40, .. })));
}
