//! Beam searches of the engine against Hugging Face.

mod given;
pub(crate) mod guest;

use serde::Deserialize;
use serde_json::Value;
use trellis_engine::account::{Account, Budget, Owner, Resource};
use trellis_engine::sampling::beams::{BeamSettings, EarlyStopping, Finished, Kept};
use trellis_engine::{BeamSearch, Context, EngineError, ModelHandle, Positions};
use trellis_tests::engines::{Sizes, block_on, engine, owner};
use trellis_tests::goldens::{self, Beams, Goldens};
use trellis_tests::pack;

/// Largest difference of a score; float32 on both sides, summed in another order.
const TOLERANCE: f32 = 1e-3;

fn early_stopping(value: &Value) -> EarlyStopping {
    match value {
        Value::Bool(false) => EarlyStopping::Heuristic,
        Value::Bool(true) => EarlyStopping::AtOnce,
        Value::String(name) if name == "never" => EarlyStopping::Never,
        other => panic!("early_stopping is {other}"),
    }
}

fn settings(model: &ModelHandle, beams: &Beams) -> BeamSettings {
    BeamSettings {
        n_beams: beams.num_beams,
        n_groups: 1,
        diversity_penalty: 0.0,
        length_penalty: beams.length_penalty,
        early_stopping: early_stopping(&beams.early_stopping),
        n_tokens_max: 40,
        stop_tokens: model.model().stop_tokens.to_vec(),
    }
}

/// How a search is driven.
#[derive(Clone, Copy, Debug)]
enum Driven {
    /// To the end at once.
    Natively,
    /// Token by token, all that lives being kept.
    Stepped,
}

async fn search(
    model: &ModelHandle,
    owner: Owner,
    prompt: &[u32],
    settings: BeamSettings,
    driven: Driven,
) -> Result<Vec<Finished>, EngineError> {
    let mut context = Context::create(model, owner).await?;
    context.append(prompt).await?;
    let n_beams = settings.n_beams;
    let mut search = BeamSearch::open(&mut context, settings, None, None).await?;
    match driven {
        Driven::Natively => search.go_on(None).await?,
        Driven::Stepped => {
            while !search.is_over() {
                search.go_on(Some(1)).await?;
                let live = search.live().enumerate();
                let kept: Vec<Kept> = live
                    .map(|(idx, live)| Kept { from: Some(idx), tokens: Vec::new(), logprob: live.logprob })
                    .collect();
                search.keep(&kept)?;
            }
        }
    }
    let best = search.best(n_beams);
    assert_eq!(search.settled(), best[0].tokens, "at the end all is settled");
    let taken = search.context(&best[0].tokens).await?;
    assert_eq!(taken.tokens().to_vec(), [prompt, &best[0].tokens].concat());
    assert_eq!(context.tokens().to_vec(), prompt, "what the search is over is left as it is");
    Ok(best)
}

/// Hugging Face pads to the longest hypothesis; a hypothesis ends with its stop token.
fn without_padding(model: &ModelHandle, sequence: &[u32]) -> Vec<u32> {
    let is_stop = |token: &u32| model.model().stop_tokens.contains(token);
    let n = sequence.iter().position(is_stop).map_or(sequence.len(), |idx| idx + 1);
    sequence[..n].to_vec()
}

fn assert_same(model: &ModelHandle, found: &[Finished], sequences: &[Vec<u32>], scores: &[f64], about: &str) {
    let expected: Vec<Vec<u32>> = sequences.iter().map(|sequence| without_padding(model, sequence)).collect();
    let tokens: Vec<Vec<u32>> = found.iter().map(|finished| finished.tokens.clone()).collect();
    assert_eq!(tokens, expected, "{about}");
    for (found, &score) in found.iter().zip(scores) {
        assert!((found.score - score as f32).abs() <= TOLERANCE, "{} for {score}: {about}", found.score);
    }
}

fn compare(goldens: &Goldens) {
    // Sixteen searches of up to eight beams ride in one step.
    let sizes = Sizes { n_pages: 1024, n_step_rows: 160, ..Sizes::default() };
    let engine = engine(&goldens.model, sizes);
    let model = engine.handle();
    let all: Vec<(&[u32], &Beams)> = goldens
        .cases
        .iter()
        .flat_map(|case| case.beams.iter().map(|beams| (case.prompt_ids.as_slice(), beams)))
        .collect();
    assert!(all.len() >= 16, "settings for each case");
    block_on(async {
        for driven in [Driven::Natively, Driven::Stepped] {
            for (prompt, beams) in &all {
                let found = search(model, owner(1), prompt, settings(model, beams), driven).await;
                let about = format!("{driven:?} {beams:?}");
                assert_same(model, &found.expect("found"), &beams.sequences, &beams.scores, &about);
            }
            for together in all.chunks(16) {
                let searches = together.iter().enumerate().map(|(idx, (prompt, beams))| {
                    let (model, prompt, beams) = (model.clone(), prompt.to_vec(), (*beams).clone());
                    tokio::spawn(async move {
                        let settings = settings(&model, &beams);
                        let found = search(&model, owner(idx as u32), &prompt, settings, driven).await;
                        let about = format!("{driven:?}, among others, {beams:?}");
                        assert_same(&model, &found.expect("found"), &beams.sequences, &beams.scores, &about);
                    })
                });
                let searches: Vec<_> = searches.collect();
                for search in searches {
                    search.await.expect("it is the same");
                }
            }
        }
    });
}

#[test]
fn searches_of_tiny_are_those_of_hugging_face() {
    compare(&goldens::load("tiny"));
}

#[test]
fn searches_of_draft_are_those_of_hugging_face() {
    compare(&goldens::load("draft"));
}

/// Searches in diverse groups, and of many beams; `tests/golden/beams.py` made them.
#[derive(Debug, Deserialize)]
struct Diverse {
    cases: Vec<DiverseCase>,
}

#[derive(Debug, Deserialize)]
struct DiverseCase {
    prompt_ids: Vec<u32>,
    searches: Vec<DiverseSearch>,
}

#[derive(Debug, Deserialize)]
struct DiverseSearch {
    num_beams: usize,
    #[serde(default)]
    num_beam_groups: Option<usize>,
    #[serde(default)]
    diversity_penalty: f32,
    length_penalty: f64,
    early_stopping: Value,
    max_tokens: usize,
    sequences: Vec<Vec<u32>>,
    scores: Vec<f64>,
}

fn diverse() -> Diverse {
    let text = std::fs::read_to_string(pack::root().join("tests/golden/beams-tiny.json"));
    serde_json::from_str(&text.expect("the golden file is there")).expect("it parses")
}

fn compare_diverse(is_wanted: impl Fn(&DiverseSearch) -> bool, sizes: Sizes) {
    let engine = engine("tiny", sizes);
    let model = engine.handle();
    let mut n_compared = 0;
    block_on(async {
        for case in &diverse().cases {
            for golden in case.searches.iter().filter(|search| is_wanted(search)) {
                let settings = BeamSettings {
                    n_beams: golden.num_beams,
                    n_groups: golden.num_beam_groups.unwrap_or(1),
                    diversity_penalty: golden.diversity_penalty,
                    length_penalty: golden.length_penalty,
                    early_stopping: early_stopping(&golden.early_stopping),
                    n_tokens_max: golden.max_tokens,
                    stop_tokens: model.model().stop_tokens.to_vec(),
                };
                for driven in [Driven::Natively, Driven::Stepped] {
                    let found = search(model, owner(1), &case.prompt_ids, settings.clone(), driven).await;
                    let mut found = found.expect("found");
                    // What earlier versions return ends with the first stop token, whichever was drawn.
                    for last in found.iter_mut().filter_map(|finished| finished.tokens.last_mut()) {
                        if settings.stop_tokens.contains(last) {
                            *last = settings.stop_tokens[0];
                        }
                    }
                    let n = golden.sequences.len();
                    assert_same(
                        model,
                        &found[..n],
                        &golden.sequences,
                        &golden.scores,
                        &format!("{settings:?}"),
                    );
                }
                n_compared += 1;
            }
        }
    });
    assert!(n_compared > 0, "there are goldens");
}

#[test]
fn diverse_groups_are_those_of_hugging_face() {
    compare_diverse(|search| search.num_beam_groups.is_some(), Sizes::default());
}

#[test]
fn many_beams_find_what_they_find_in_hugging_face() {
    let sizes = Sizes { n_pages: 2048, ..Sizes::of_daemon() };
    compare_diverse(|search| search.num_beams == 512, sizes);
}

#[test]
fn a_search_is_charged_and_gives_back_what_it_took() {
    let engine = engine("tiny", Sizes::default());
    let model = engine.handle();
    let golden = &goldens::load("tiny").cases[0];
    let plain = |n_beams| BeamSettings { n_beams, ..settings(model, &golden.beams[0]) };
    let owner_of = |budget| Owner { account: Account::new("guest", budget, None), ..owner(1) };
    block_on(async {
        let free = owner_of(Budget::UNLIMITED);
        let before =
            search(model, free.clone(), &golden.prompt_ids, plain(4), Driven::Natively).await.expect("found");
        assert!(free.account.used(Resource::Tokens) >= 4);

        // Too little of anything is an error with the numbers, and all comes back.
        for budget in [
            Budget { n_contexts: 5, ..Budget::UNLIMITED },
            Budget { n_pages: 4, ..Budget::UNLIMITED },
            Budget { n_tokens: 6, ..Budget::UNLIMITED },
            Budget { host_bytes: 10_000, ..Budget::UNLIMITED },
        ] {
            let poor = owner_of(budget);
            let refused = search(model, poor.clone(), &golden.prompt_ids, plain(4), Driven::Natively).await;
            let Err(EngineError::BeamsOverBudget { n_beams: 4, exceeded }) = refused else {
                panic!("{budget:?}: {refused:?}");
            };
            // Of contexts it says how many it takes.
            let n_contexts = if exceeded.what == Resource::Contexts.name() { 5 } else { exceeded.requested };
            assert!(exceeded.requested == n_contexts && exceeded.requested + exceeded.used > exceeded.limit);
            for what in [Resource::Contexts, Resource::HostBytes] {
                assert_eq!(poor.account.used(what), 0, "{what:?}");
            }
        }
        let rows = search(model, owner(1), &golden.prompt_ids, plain(125), Driven::Natively).await;
        assert!(
            matches!(rows, Err(EngineError::TooManyBeams { n_beams: 125, n_beams_max: 120 })),
            "{rows:?}"
        );

        let again =
            search(model, free.clone(), &golden.prompt_ids, plain(4), Driven::Natively).await.expect("found");
        assert_eq!(again, before);
        for what in [Resource::Contexts, Resource::HostBytes] {
            assert_eq!(free.account.used(what), 0, "{what:?}");
        }
    });
}

#[test]
fn a_search_goes_on_from_what_an_eviction_left() {
    let engine = engine("tiny", Sizes::default());
    let model = engine.handle();
    let golden = &goldens::load("tiny").cases[1];
    // What comes after it is not certain.
    let prompt: Vec<u32> = (0..60).map(|n| 100 + 37 * n).collect();
    block_on(async {
        for positions in [Positions::Keep, Positions::CloseUp] {
            let mut whole = Context::create(model, owner(1)).await.expect("created");
            // Holes that end inside a page and beyond the first.
            whole.append(&prompt).await.expect("fits");
            let mut holed = whole.fork().await.expect("forked");
            holed.evict(2, 5, positions).await.expect("the model sees all positions");
            holed.evict(9, 20, positions).await.expect("the model sees all positions");
            let settings = settings(model, &golden.beams[0]);
            let settings = BeamSettings { n_tokens_max: 20, stop_tokens: Vec::new(), ..settings };
            let mut search =
                BeamSearch::open(&mut holed, settings.clone(), None, None).await.expect("opened");
            let mut of_whole = BeamSearch::open(&mut whole, settings, None, None).await.expect("opened");
            for _ in 0..18 {
                search.go_on(Some(1)).await.expect("a step");
                of_whole.go_on(Some(1)).await.expect("a step");
            }
            assert!(search.live().len() > 1, "{:?}", search.live().collect::<Vec<_>>());
            let best = |search: &BeamSearch| search.live().next().expect("one lives").logprob;
            let (of_holed, of_whole) = (best(&search), best(&of_whole));
            assert!((of_holed - of_whole).abs() > 10.0 * TOLERANCE, "{of_holed}, {of_whole}: it is not seen");
            for (idx, live) in search.live().enumerate() {
                let tokens = search.tokens(idx).expect("it lives");
                let mut alone = holed.fork().await.expect("forked");
                let ask = trellis_engine::Ask::Continuation(tokens.clone());
                let answer = alone.ask(ask).await.expect("asked").answer().await.expect("answered");
                let trellis_engine::Answer::Scores(scores) = answer else { panic!("asked for scores") };
                let expected: f32 = scores.iter().sum();
                assert!((live.logprob - expected).abs() < TOLERANCE, "{live:?} for {expected}, {tokens:?}");
            }
        }
    });
}

#[test]
fn what_the_guest_makes_of_hypotheses_is_what_goes_on() {
    let engine = engine("tiny", Sizes::default());
    let model = engine.handle();
    let golden = &goldens::load("tiny").cases[1];
    block_on(async {
        let mut context = Context::create(model, owner(1)).await.expect("created");
        context.append(&golden.prompt_ids).await.expect("fits");
        let plain = BeamSettings { n_tokens_max: 8, ..settings(model, &golden.beams[0]) };
        let mut edited = BeamSearch::open(&mut context, plain.clone(), None, None).await.expect("opened");
        edited.go_on(Some(2)).await.expect("two steps");
        // One goes on as it is, one by other tokens, and the prompt anew: each is then as it would be by itself.
        let first = edited.tokens(1).expect("it lives");
        let kept = [
            Kept { from: Some(1), tokens: Vec::new(), logprob: 0.0 },
            Kept { from: Some(0), tokens: vec![300, 301], logprob: -1.0 },
            Kept { from: None, tokens: vec![302], logprob: -2.0 },
        ];
        let texts = [first, [edited.tokens(0).expect("it lives"), vec![300, 301]].concat(), vec![302]];
        edited.keep(&kept).expect("in order");
        edited.go_on(Some(1)).await.expect("a step");
        assert!(edited.live().len() == 4, "{:?}", edited.live().collect::<Vec<_>>());
        for (idx, live) in edited.live().enumerate() {
            let tokens = edited.tokens(idx).expect("it lives");
            let (last, before) = tokens.split_last().expect("it has tokens");
            let place = texts.iter().position(|text| text == before).expect("it continues one that was kept");
            let mut alone = Context::create(model, owner(1)).await.expect("created");
            alone.append(&[golden.prompt_ids.as_slice(), before].concat()).await.expect("fits");
            let ask = trellis_engine::Ask::Scores(vec![*last]);
            let answer = alone.ask(ask).await.expect("asked").answer().await.expect("answered");
            let trellis_engine::Answer::Scores(scores) = answer else { panic!("asked for scores") };
            let expected = scores[0] - place as f32;
            assert!((live.logprob - expected).abs() < TOLERANCE, "{live:?} for {expected}");
        }
        edited.keep(&[]).expect("in order");
        assert!(edited.is_over());
        edited.go_on(None).await.expect("nothing is left to do");

        // One that was dropped while it searched leaves nothing behind.
        let mut dropped = BeamSearch::open(&mut context, plain.clone(), None, None).await.expect("opened");
        let going_on = dropped.go_on(None);
        assert!(tokio::time::timeout(std::time::Duration::ZERO, going_on).await.is_err());
        drop(dropped);
        let stats = model.stats().await.expect("it works");
        let n_left = 1 + 1 + plain.n_beams;
        assert_eq!(stats.n_contexts, n_left, "the context, and those of the search that is held: {stats:?}");
    });
}
