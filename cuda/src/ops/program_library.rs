//! Every sampler of the library as a program, for tests.

use trellis_engine::sampling::program::Definition;
use trellis_programs::library::{self, Chain, Dry, KgwKey, Penalties};
use trellis_programs::{Builder, Row, Source, Token as Drawn};

/// By name. Those with penalties look at the history, and mixtures at other members.
pub(crate) fn library_programs() -> Vec<(&'static str, Definition)> {
    fn drawn(row: impl for<'b> Fn(&'b Builder, Row<'b>) -> Row<'b>) -> Definition {
        Definition::build(|b| row(b, b.logits()).draw(Source::SEED))
    }
    fn token(write: impl for<'b> Fn(&'b Builder) -> Drawn<'b>) -> Definition {
        Definition::build(|b| write(b))
    }
    let dry = Dry { window: 256, allowed_length: 2.0, multiplier: 0.8, base: 1.75, breakers: None };
    let penalties = Penalties { last_n: Some(64), repetition: 1.3, frequency: 0.25, presence: 0.5 };
    let chain = Chain {
        penalties: Some(penalties),
        temperature: 0.8,
        top_k: Some(50),
        top_p: Some(0.95),
        min_p_log: Some(0.02f32.ln()),
        ..Chain::default()
    };
    vec![
        ("greedy", token(|b| library::greedy(b.logits()))),
        ("draw", token(|b| b.logits().draw(Source::SEED))),
        ("temperature", drawn(|_, x| library::temperature(x, 0.7))),
        ("dynamic temperature", drawn(|_, x| library::dynamic_temperature(x, 0.9, 0.4, 1.0))),
        ("top-k", drawn(|_, x| library::top_k(x, 50.0))),
        ("top-p", drawn(|_, x| library::top_p(x, 0.95))),
        ("top-k, top-p", drawn(|_, x| library::top_p(library::top_k(x, 50.0), 0.95))),
        ("min-p", drawn(|_, x| library::min_p(x, 0.05))),
        ("typical", drawn(|_, x| library::typical(x, 0.9))),
        ("epsilon", drawn(|_, x| library::epsilon(x, 3e-4))),
        ("eta", drawn(|_, x| library::eta(x, 3e-4))),
        ("top-n-sigma", drawn(|_, x| library::top_n_sigma(x, 1.0))),
        ("xtc", drawn(|_, x| library::xtc(x, 0.5, 0.01))),
        ("plausible", drawn(|_, x| library::plausible(x, 0.1))),
        ("contrastive", drawn(|b, x| library::contrastive(x, b.member(0), 0.1, 0.5))),
        ("guidance", drawn(|b, x| library::guidance(x, b.member(0), 1.5))),
        ("experts", drawn(|b, x| library::experts(x, b.member(0), b.member(1), 0.5))),
        ("ensemble", drawn(|b, x| library::ensemble(x, b.member(0), 0.25))),
        ("product", drawn(|b, x| library::product(x, b.member(0), 0.25))),
        ("mirostat", token(|b| library::mirostat(b.logits(), 5.0, 5.0, 0.1))),
        ("repetition", drawn(|_, x| library::repetition(x, Some(64), 1.2))),
        ("frequency, presence", drawn(|_, x| library::frequency_presence(x, None, 0.3, 0.2))),
        ("no repeat", drawn(|_, x| library::no_repeat_ngram(x, 3))),
        ("dry", drawn(move |_, x| library::dry(x, dry))),
        ("kgw", drawn(|_, x| library::kgw(x, KgwKey { key: 7, n_tokens: 1 }, 0.25, 2.0))),
        ("unigram", drawn(|_, x| library::unigram(x, 7, 0.5, 2.0))),
        ("gumbel watermark", token(|b| library::gumbel_watermark(b.logits(), 7, 4))),
        ("chain", token(move |b| library::chain(b, chain))),
    ]
}
