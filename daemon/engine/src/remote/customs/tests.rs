//! What customs let through.

use std::sync::Arc;

use super::*;
use crate::command::{Ahead, Edit, MaskSource, RunSettings};
use crate::completion::Tag;
use crate::port::Port;
use crate::sampling::{Bias, Sampler, TokenMask};
use crate::steering::Steering;

const FACTS: ModelFacts = ModelFacts {
    vocab_size: 100,
    n_positions_max: 1000,
    n_layers: 4,
    hidden_size: 2,
    n_stretches_max: 8,
    given_bytes: 1 << 20,
};
const OWN: CallerId = CallerId(5);
const OTHER: CallerId = CallerId(6);
const N_CALLERS: usize = 2;
const TAG: Tag = Tag::new(3, 1);

fn id(number: u64) -> ContextId {
    ContextId { model: ModelId::default(), number }
}

/// A mask as bytes may say it.
#[derive(serde::Serialize)]
struct Forged {
    words: Vec<u64>,
    vocab_size: usize,
}

/// A process with two callers and a context of each.
fn process() -> Customs {
    let mut customs = Customs::new(100..1000);
    for (caller, number) in [(OWN, 100), (OTHER, 101)] {
        customs.enter(caller, N_CALLERS).expect("there is room");
        let made = check(&mut customs, caller, Operation::Create { id: id(number), caller });
        assert!(made.is_ok_and(|made| made.is_some()));
    }
    customs
}

fn check(
    customs: &mut Customs,
    from: CallerId,
    operation: Operation,
) -> Result<Option<Operation>, Violation> {
    let other = ModelId { place: 1, generation: 0 };
    customs.check(from, operation, |model| match model {
        _ if model == ModelId::default() => Some(FACTS),
        _ if model == other => Some(ModelFacts { vocab_size: 50, ..FACTS }),
        _ => None,
    })
}

#[test]
fn callers_that_do_not_leave_come_to_an_end() {
    let mut customs = process();
    let third = CallerId(7);
    let entered = customs.enter(third, N_CALLERS);
    assert!(matches!(entered, Err(Violation::TooManyCallers { limit: N_CALLERS })), "{entered:?}");
    assert!(!customs.has(third));
    customs.leave(OTHER);
    customs.enter(third, N_CALLERS).expect("one has left");
}

fn edited(number: u64, tokens: &[u32]) -> Operation {
    let edit = Edit { appended: tokens.to_vec(), ..Edit::default() };
    Operation::Edit { id: id(number), edit }
}

#[test]
fn a_caller_names_what_is_its_own() {
    let mut customs = process();
    assert!(check(&mut customs, OWN, edited(100, &[1, 99])).is_ok_and(|passed| passed.is_some()));
    let refused = |customs: &mut Customs, from, operation| {
        check(customs, from, operation).expect_err("it is not its own").to_string()
    };
    for (from, operation, said) in [
        (OWN, edited(101, &[]), "context 101, which is not the caller's"),
        (OWN, edited(500, &[]), "context 500, which is not the caller's"),
        (CallerId(0), edited(100, &[]), "an operation of caller 0, which has not entered"),
        (
            OWN,
            Operation::Create { id: id(102), caller: OTHER },
            "an operation of caller 5 in the name of caller 6",
        ),
        (
            OWN,
            Operation::Stats { model: ModelId::default(), caller: OWN, tag: TAG },
            "an operation that no guest may ask for",
        ),
        (
            OWN,
            Operation::Create { id: id(101), caller: OWN },
            "a new context of number 101: one that was not used before",
        ),
        (
            OWN,
            Operation::Create { id: id(1000), caller: OWN },
            "a new context of number 1000: one of the process's own",
        ),
        (
            OWN,
            edited(100, &[100]),
            "its own side refuses this: token 100 is out of range: the vocabulary has 100 entries",
        ),
        (
            OWN,
            edited(100, &[1; 1001]),
            "its own side refuses this: 1001 tokens do not fit: the context holds 1000",
        ),
    ] {
        assert_eq!(refused(&mut customs, from, operation), said);
    }
    let stranger = ContextId { model: ModelId { place: 7, generation: 2 }, number: 103 };
    assert_eq!(
        refused(&mut customs, OWN, Operation::Create { id: stranger, caller: OWN }),
        "a model at place 7 of generation 2, which the process does not know"
    );
    // Members of one operation are the sender's, of one model, and there once.
    let sampler = Arc::new(Sampler::greedy());
    let together = |numbers: &[u64]| {
        let members = numbers.iter().map(|&number| (id(number), Edit::default())).collect();
        Operation::DrawTogether { members, sampler: sampler.clone(), tag: TAG }
    };
    assert!(check(&mut customs, OWN, together(&[100])).is_ok());
    assert_eq!(refused(&mut customs, OWN, together(&[100, 100])), "context 100 twice in one operation");
    assert_eq!(refused(&mut customs, OWN, together(&[100, 101])), "context 101, which is not the caller's");
    assert_eq!(refused(&mut customs, OWN, together(&[])), "0 contexts: at least 1");
}

#[test]
fn what_comes_after_a_context_is_gone_is_dropped_and_a_number_is_used_once() {
    let mut customs = process();
    let release = |number| Operation::Release { id: id(number), n_pulled: 0 };
    assert!(check(&mut customs, OWN, release(100)).is_ok_and(|passed| passed.is_some()));
    let late = Operation::Cancel { id: id(100), tag: TAG };
    assert!(check(&mut customs, OWN, late.clone()).is_ok_and(|passed| passed.is_none()));
    // Of another's it says nothing either.
    let of_other = Operation::Pulled { id: id(101), tag: TAG, n_tokens: 1, is_waiting: true };
    assert!(check(&mut customs, OWN, of_other).is_ok_and(|passed| passed.is_none()));
    check(&mut customs, OWN, release(100)).expect_err("it is gone");
    // One that was given up before it was made.
    assert!(check(&mut customs, OWN, release(102)).is_ok());
    check(&mut customs, OWN, Operation::Create { id: id(102), caller: OWN }).expect_err("it was used");
    assert_eq!(customs.n_contexts(), 1);
    assert!(customs.leave(OWN).is_empty());
    assert!(check(&mut customs, OWN, late).is_ok_and(|passed| passed.is_none()), "it has left");
    check(&mut customs, OWN, edited(101, &[])).expect_err("it has left");
    assert!(matches!(customs.leave(OTHER)[..], [Operation::Release { id: left, .. }] if left == id(101)));
}

#[test]
fn rows_are_read_by_draws_over_their_vocabulary() {
    let mut customs = process();
    let small = ContextId { model: ModelId { place: 1, generation: 0 }, number: 100 };
    let keep = |id| Operation::Ask { id, edit: Edit::default(), ask: Ask::Keep, tag: TAG };
    check(&mut customs, OWN, Operation::Create { id: small, caller: OWN }).expect("it is free");
    check(&mut customs, OWN, keep(small)).expect("it is the first");
    let twice = check(&mut customs, OWN, keep(id(100))).expect_err("it is there");
    assert!(matches!(twice, Violation::RowTwice), "{twice}");
    let mix = |caller| {
        let (sampler, rows) = (Arc::new(Sampler::greedy()), vec![RowName { caller, tag: TAG }]);
        Operation::Ask { id: id(100), edit: Edit::default(), ask: Ask::Mix { sampler, rows }, tag: TAG }
    };
    let other = check(&mut customs, OWN, mix(OWN)).expect_err("it is too short");
    assert!(matches!(other, Violation::RowOfAnother { n_tokens: 50, vocab_size: 100 }), "{other}");
    let another = check(&mut customs, OWN, mix(OTHER)).expect_err("it is another's");
    assert!(matches!(another, Violation::InAnothersName { .. }), "{another}");
    let left = customs.leave(OWN);
    assert!(matches!(left[0], Operation::LetGo { row } if row == RowName { caller: OWN, tag: TAG }));
    assert_eq!(left.len(), 3, "{left:?}");
}

#[test]
fn what_is_given_is_made_again_where_it_arrives() {
    // Bits past a vocabulary, words that do not fit it, numbers that mean nothing.
    let mask = rmp_serde::to_vec_named(&TokenMask::all(70)).expect("it is plain data");
    let whole: TokenMask = Port::value_of(&mask).expect("it is a mask");
    assert_eq!(whole, TokenMask::all(70));
    let forged = |words: Vec<u64>, vocab_size| {
        Port::value_of::<TokenMask>(&Port::bytes_of(&Forged { words, vocab_size }))
    };
    assert_eq!(forged(vec![u64::MAX; 2], 70), Some(TokenMask::all(70)));
    assert_eq!(forged(vec![u64::MAX], 70), None);
    let bias = |bias: Bias| Port::value_of::<Bias>(&Port::bytes_of(&bias));
    assert_eq!(bias(Bias::Dense(vec![f32::NAN])), None);
    assert_eq!(bias(Bias::Sparse(vec![(3, f32::INFINITY)])), None);
    let sorted = Bias::Sparse(vec![(1, 2.0), (3, 1.0)]);
    assert_eq!(bias(Bias::Sparse(vec![(3, 1.0), (1, 4.0), (1, 2.0)])), Some(sorted));
    // Two steerings are told apart by what they are, whatever a sender says.
    let steering = |value: f32| Steering::from(vec![(1, vec![value])]);
    let arrived: Steering = Port::value_of(&Port::bytes_of(&steering(2.0))).expect("it is a steering");
    assert!(arrived == steering(2.0) && arrived != steering(1.0));
}

#[test]
fn settings_are_held_against_the_model() {
    let mut customs = process();
    let run = |change: &dyn Fn(&mut RunSettings)| {
        let mut settings = RunSettings {
            sampler: Arc::new(Sampler::greedy()),
            stop_tokens: Arc::new([]),
            n_tokens_max: None,
            ahead: Ahead::Adaptive,
            masks: MaskSource::Sampler,
        };
        change(&mut settings);
        Operation::Run { id: id(100), edit: Edit::default(), settings, tag: TAG }
    };
    let sampler = |change: &dyn Fn(&mut Sampler)| {
        let mut sampler = Sampler::greedy();
        change(&mut sampler);
        run(&|settings| settings.sampler = Arc::new(sampler.clone()))
    };
    assert!(check(&mut customs, OWN, run(&|_| {})).is_ok());
    for refused in [
        run(&|settings| settings.stop_tokens = vec![1; 5000].into()),
        sampler(&|sampler| sampler.temperature = f32::NAN),
        sampler(&|sampler| sampler.bias = vec![(100, 1.0)]),
        sampler(&|sampler| sampler.bias = vec![(1, 1.0); 5000]),
        sampler(&|sampler| sampler.mask = Some(Arc::new(TokenMask::all(101)))),
        sampler(&|sampler| sampler.looks.hidden = vec![5]),
        sampler(&|sampler| sampler.looks.n_top = usize::MAX),
    ] {
        check(&mut customs, OWN, refused).expect_err("no guest of ours asks for it");
    }
}

#[test]
fn of_a_model_that_is_gone_names_are_checked_and_nothing_is_kept_but_contexts() {
    let mut customs = process();
    let gone = |number| ContextId { model: ModelId { place: 1, generation: 3 }, number };
    let made = |number, caller| Operation::Create { id: gone(number), caller };
    // Far above all that were used: which were is not known any more.
    assert!(customs.check_gone(OWN, made(900, OWN)).is_ok_and(|passed| passed.is_some()));
    assert_eq!(customs.n_contexts(), 3);
    for (from, operation) in [
        (OWN, made(900, OWN)),
        (OWN, made(901, OTHER)),
        (OWN, made(1000, OWN)),
        (CallerId(0), made(901, CallerId(0))),
        (OTHER, Operation::Edit { id: gone(900), edit: Edit::default() }),
        (OWN, Operation::Stats { model: gone(0).model, caller: OWN, tag: TAG }),
    ] {
        customs.check_gone(from, operation).expect_err("no guest of ours asks that");
    }
    // What is in it does not matter: nobody looks.
    let edit = Edit { appended: vec![u32::MAX; 2000], ..Edit::default() };
    let edited = Operation::Edit { id: gone(900), edit };
    assert!(customs.check_gone(OWN, edited).is_ok_and(|passed| passed.is_some()));
    let kept = Operation::Ask { id: gone(900), edit: Edit::default(), ask: Ask::Keep, tag: TAG };
    assert!(customs.check_gone(OWN, kept).is_ok_and(|passed| passed.is_some()));
    assert!(customs.rows.is_empty());
    let release = Operation::Release { id: gone(900), n_pulled: 0 };
    assert!(customs.check_gone(OWN, release).is_ok_and(|passed| passed.is_some()));
    assert_eq!((customs.n_contexts(), customs.numbers.len()), (2, 1));
    customs.forget_numbers(|_| false);
    assert!(customs.numbers.is_empty());
}
