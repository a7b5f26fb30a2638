//! Questions about hidden states, and about attention.

use std::sync::Arc;

use super::super::cost::{Costs, StepWork};
use super::hash_backend::score;
use super::verify::House;
use super::{Answer, Ask, Model, Token};
use crate::backend::AskLimits;
use crate::command::{Ahead, Edit, MaskSource, Operation, Pooling, RunSettings};
use crate::sampling::{Looks, Sampler};

impl Model {
    /// A question about hidden states, of the last token or of many, and its answer.
    pub(super) fn hidden_question(&self, seed: u64) -> (Ask, Answer) {
        let n_tokens = self.tokens.len();
        let n_layers = vec![(seed / 7 % 3) as usize, 5];
        let n_summed = match self.past.evictions.is_empty() {
            true => 1 + (seed / 128) as usize % n_tokens,
            false => 1,
        };
        let pooling = match n_summed {
            1 => Pooling::Last,
            _ => Pooling::MeanFrom(n_tokens - n_summed),
        };
        let state = |n_layers: usize| {
            let chains = (0..n_summed).map(|n| match n_summed {
                1 => self.chain(),
                _ => self.past.chain(&self.tokens[..n_tokens - n]),
            });
            let sum: f64 = chains.map(|chain| f64::from(score(chain.last, n_layers as Token))).sum();
            vec![(sum / n_summed as f64) as f32]
        };
        let states = n_layers.iter().map(|&n_layers| state(n_layers)).collect();
        (Ask::Hidden { n_layers, pooling }, Answer::Hidden(states))
    }

    /// A question about attention, and its answer.
    pub(super) fn attention_question(&self, seed: u64) -> (Ask, Answer) {
        let layers = vec![(seed / 16 % 3) as usize, 4];
        let prefix = self.chain().last;
        let masses = layers.iter().map(|&layer| score(prefix, layer as Token)).collect();
        (Ask::Attention { layers }, Answer::Attention(masses))
    }
}

/// A stream brings back a state in each step, and a step no more than eight.
#[test]
fn a_mean_goes_on_beside_a_stream_that_looks_at_hidden_states() {
    let mut house = House::new(64, u64::MAX);
    house.scheduler.limits.asks = AskLimits { whole_bytes: 8 * size_of::<f32>(), ..AskLimits::NONE };
    let (streaming, asked) = (house.create(), house.create());
    let looks = Looks { n_top: 0, hidden: vec![1] };
    let settings = RunSettings {
        sampler: Arc::new(Sampler { seed: 8, looks, ..Sampler::greedy() }),
        stop_tokens: Arc::new([]),
        n_tokens_max: None,
        ahead: Ahead::Unbounded,
        masks: MaskSource::Sampler,
    };
    let queue = house.guests.queue(house.caller);
    let edit = Edit { appended: vec![1, 2], ..Edit::default() };
    house.scheduler.apply(Operation::Run { id: streaming, edit, settings, tag: queue.tag() });
    let tokens: Vec<Token> = (0..100).map(|token| token % 40).collect();
    let ask = Ask::Hidden { n_layers: vec![2], pooling: Pooling::MeanFrom(0) };
    let place = house.ask(asked, 0, &tokens, ask);
    for _ in 0..100 {
        let (plan, outputs) = house.submit();
        house.scheduler.complete(plan, outputs, 1_000_000);
        if let Some(answer) = house.try_answer(&place) {
            assert!(matches!(answer, Ok(Answer::Hidden(states)) if states.len() == 1));
            return;
        }
    }
    panic!("the mean starves");
}

/// It reads all keys twice for each query head; what the row itself costs is paid by every row.
#[test]
fn attention_as_an_output_costs_what_it_reads() {
    let n_ns = |layers: Vec<usize>, n_tokens: usize| {
        let mut house = House::new(400, u64::MAX);
        (house.scheduler.limits.n_layers, house.scheduler.limits.n_queries_per_key) = (4, 8);
        // 100 pages of weights take 1 ms.
        house.scheduler.costs = Costs::new(100.0);
        let decode = StepWork { n_decode_rows: 1, ..StepWork::default() };
        (0..50).for_each(|_| house.scheduler.costs.learn(decode, 1_000_000));
        let asked = house.create();
        let tokens: Vec<Token> = (0..n_tokens as Token).map(|token| token % 40).collect();
        let place = house.ask(asked, 0, &tokens, Ask::Prefill);
        assert!(house.answer(place).0.is_ok());
        house.ask(asked, n_tokens, &[], Ask::Attention { layers });
        let (plan, _) = house.submit();
        assert_eq!(plan.work.n_decode_rows, 1);
        house.scheduler.costs.step_ns(plan.work).expect("it is known")
    };
    let plain = n_ns(vec![], 320);
    let all = n_ns(vec![0, 1, 2, 3], 320) - plain;
    // 20 pages for each of eight query heads, at a little less than 10 µs a page: the row reads pages too.
    assert!((1_500_000..1_600_000).contains(&all), "{all}");
    let half = n_ns(vec![0, 3], 320) - plain;
    assert!((all / 2 - 20_000..all / 2 + 20_000).contains(&half), "{half}");
    let short = n_ns(vec![0, 1, 2, 3], 31) - plain;
    assert!((150_000..170_000).contains(&short), "{short}");
}

/// Between layers a state is copied; after all of them it goes through the output projection.
#[test]
fn a_state_after_all_layers_costs_a_row_of_logits() {
    let n_prompt_tokens = |ask: Ask| {
        let mut house = House::new(1024, u64::MAX);
        house.scheduler.limits.logits_tokens = 4.0;
        house.scheduler.limits.n_layers = 6;
        let asked = house.create();
        house.ask(asked, 0, &[1, 2, 3, 4, 5, 6, 7, 8], ask);
        let (plan, _) = house.submit();
        plan.work.n_prompt_tokens
    };
    let mean =
        |n_layers: &[usize]| Ask::Hidden { n_layers: n_layers.to_vec(), pooling: Pooling::MeanFrom(0) };
    assert_eq!(n_prompt_tokens(mean(&[5])), 8 + 8);
    assert_eq!(n_prompt_tokens(mean(&[6])), 8 + 8 * 4);
    assert_eq!(n_prompt_tokens(mean(&[0, 5, 6])), 8 + 8 * (1 + 1 + 4));
    let last = Ask::Hidden { n_layers: vec![6], pooling: Pooling::Last };
    assert_eq!(n_prompt_tokens(last), n_prompt_tokens(Ask::Embedding));
}
