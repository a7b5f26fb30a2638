//! Logit programs that streams of a mix draw by: the samplers of the library, and made-up ones of a size.

use std::sync::Arc;

use trellis_engine::ModelHandle;
use trellis_engine::sampling::Sampler;
use trellis_engine::sampling::program::{
    DEPTH_MAX, Definition, N_OPERATIONS_MAX, Program, ProgramError, PutOn, RowShape,
};
use trellis_programs::library::{self, Dry, KgwKey};
use trellis_programs::{Builder, Row, Source, Token};

use super::error::MixError;
use super::fields::{Fields, NameOrTable};
use crate::nearest::hint;

/// A sampler of the library.
struct Named {
    name: &'static str,
    /// The numbers that it is given, as the help says them; empty if it takes none.
    numbers: &'static str,
    write: for<'b> fn(&'b Builder) -> Token<'b>,
}

/// The samplers that need neither masks nor other contexts, each with the numbers of its source where that recommends some. All
/// but the two that are about temperature draw at temperature 1.
const NAMED: [Named; 20] = [
    Named { name: "greedy", numbers: "", write: |b| library::greedy(b.logits()) },
    Named { name: "temperature", numbers: "0.8", write: |b| drawn(library::temperature(b.logits(), 0.8)) },
    Named {
        name: "dynamic-temperature",
        numbers: "0.5 to 1.5",
        write: |b| drawn(library::dynamic_temperature(b.logits(), 1.0, 0.5, 1.0)),
    },
    Named { name: "top-k", numbers: "50", write: |b| drawn(library::top_k(b.logits(), 50.0)) },
    Named { name: "top-p", numbers: "0.95", write: |b| drawn(library::top_p(b.logits(), 0.95)) },
    Named { name: "min-p", numbers: "0.1", write: |b| drawn(library::min_p(b.logits(), 0.1)) },
    Named { name: "typical", numbers: "0.9", write: |b| drawn(library::typical(b.logits(), 0.9)) },
    Named { name: "epsilon", numbers: "3e-4", write: |b| drawn(library::epsilon(b.logits(), 3e-4)) },
    Named { name: "eta", numbers: "3e-4", write: |b| drawn(library::eta(b.logits(), 3e-4)) },
    Named { name: "top-n-sigma", numbers: "1", write: |b| drawn(library::top_n_sigma(b.logits(), 1.0)) },
    Named {
        name: "xtc",
        numbers: "probability 0.5, threshold 0.1",
        write: |b| drawn(library::xtc(b.logits(), 0.5, 0.1)),
    },
    Named {
        name: "mirostat",
        numbers: "tau 5, eta 0.1",
        write: |b| library::mirostat(b.logits(), 5.0, 5.0, 0.1),
    },
    Named { name: "power", numbers: "alpha 4", write: |b| library::power(b.logits(), 4.0) },
    Named {
        name: "repetition",
        numbers: "1.2",
        write: |b| drawn(library::repetition(b.logits(), None, 1.2)),
    },
    Named {
        name: "frequency-presence",
        numbers: "0.5 and 0.5",
        write: |b| drawn(library::frequency_presence(b.logits(), None, 0.5, 0.5)),
    },
    Named {
        name: "no-repeat-ngram",
        numbers: "3",
        write: |b| drawn(library::no_repeat_ngram(b.logits(), 3)),
    },
    Named {
        name: "dry",
        numbers: "multiplier 0.8, base 1.75, from 2 tokens on, of the last 1,024",
        write: |b| {
            let settings =
                Dry { window: 1024, allowed_length: 2.0, multiplier: 0.8, base: 1.75, breakers: None };
            drawn(library::dry(b.logits(), settings))
        },
    },
    Named {
        name: "kgw",
        numbers: "gamma 0.25, delta 2",
        write: |b| drawn(library::kgw(b.logits(), KgwKey { key: 7, n_tokens: 1 }, 0.25, 2.0)),
    },
    Named {
        name: "unigram",
        numbers: "gamma 0.5, delta 2",
        write: |b| drawn(library::unigram(b.logits(), 7, 0.5, 2.0)),
    },
    Named {
        name: "gumbel-watermark",
        numbers: "by 4 tokens",
        write: |b| library::gumbel_watermark(b.logits(), 7, 4),
    },
];

fn drawn(row: Row<'_>) -> Token<'_> {
    row.draw(Source::SEED)
}

/// What the help of `trellis bench` says of programs.
pub(in crate::cli::bench) fn help() -> String {
    let mut text = "\
Streams of a mix draw greedily, or as `sampler = { temperature = 0.8 }` says, or by a logit
program: a made-up one of a size, `program = { operations = 12, reductions = 2 }`, where the draw
is one of the reductions; or a sampler of the library, `program = \"typical\"`. What they cost a
token is shown by `trellis bench --mix programs`. The samplers and their numbers:"
        .to_owned();
    for Named { name, numbers, .. } in NAMED {
        text.push_str(format!("\n  {name:<20} {numbers}").trim_end());
    }
    text
}

/// The program that a load names, or describes by its size.
///
/// # Errors
/// There is no such sampler, or no such size.
pub(super) fn read(fields: &mut Fields<'_>) -> Result<Option<Definition>, MixError> {
    match fields.name_or_table("program", "the name of a sampler, or a table of operations and reductions")? {
        None => Ok(None),
        Some(NameOrTable::Name(name)) => match NAMED.iter().find(|named| named.name == name) {
            Some(named) => Ok(Some(Definition::build(named.write))),
            None => Err(MixError::UnknownProgram {
                place: fields.place().to_owned(),
                name: name.to_owned(),
                known: NAMED.map(|named| named.name).join(", "),
                hint: hint(name, NAMED.iter().map(|named| named.name)),
            }),
        },
        Some(NameOrTable::Table(mut size)) => {
            let n_reductions = size.count("reductions", 1..=DEPTH_MAX)?.unwrap_or(1);
            let n_operations = size.count("operations", n_operations_min(n_reductions)..=N_OPERATIONS_MAX)?;
            let n_operations = size.required("operations", n_operations)?;
            size.finish()?;
            Ok(Some(of_size(n_operations, n_reductions)))
        }
    }
}

/// Divides the logits of a made-up program.
const TEMPERATURE: f32 = 0.8;

/// The fewest operations of a made-up program with so many reductions.
fn n_operations_min(n_reductions: usize) -> usize {
    match n_reductions {
        // The logits, a temperature, the division, the draw.
        ..=1 => 4,
        // Each truncation takes five; the first also two constants and the set of all tokens.
        _ => 12 + 5 * (n_reductions - 2),
    }
}

/// A program that draws at a temperature, with so many operations. The draw is the last of the reductions; each of the others
/// finds the best of what the one before it kept, and keeps what is at most four nats below. Operations that are left add to the
/// whole row, or subtract from it, which changes no probability.
fn of_size(n_operations: usize, n_reductions: usize) -> Definition {
    Definition::build(|b| {
        let mut x = b.logits() / TEMPERATURE;
        for _ in 1..n_reductions {
            let bound = -(4.0 - x.max());
            x = x.keep(x.gt(bound));
        }
        for idx in 0..n_operations - n_operations_min(n_reductions) {
            // The constant is there already.
            x = if idx % 2 == 0 { x + TEMPERATURE } else { x - TEMPERATURE };
        }
        drawn(x)
    })
}

/// Takes the most probable token under guidance.
pub(super) fn guidance() -> Definition {
    Definition::build(|b| library::guidance(b.logits(), b.member(0), 1.5).argmax())
}

/// A sampler that draws by this program over the rows of this model.
///
/// # Errors
/// The program costs too much for such rows.
pub(super) fn sampler(
    definition: Definition,
    seed: u64,
    model: &ModelHandle,
) -> Result<Arc<Sampler>, ProgramError> {
    let limits = model.limits();
    let shape = RowShape { vocab_size: limits.vocab_size, n_positions: limits.n_positions_max };
    let program = Arc::new(Program::new(definition, shape)?);
    Ok(Arc::new(Sampler { seed, program: Some(Box::new(PutOn::new(program))), ..Sampler::greedy() }))
}

#[cfg(test)]
mod tests {
    use trellis_engine::sampling::program::Operation;

    use super::*;

    /// Of `llama-3.1-8b`.
    const SHAPE: RowShape = RowShape { vocab_size: 128_256, n_positions: 131_072 };

    fn n_reductions(definition: &Definition) -> usize {
        let is_one =
            |operation: &&Operation| matches!(operation, Operation::Reduce(..) | Operation::Draw(..));
        definition.operations.iter().filter(is_one).count()
    }

    #[test]
    fn a_program_of_twelve_operations_with_two_reductions_keeps_what_is_near_the_best() {
        let expected = Definition::build(|b| {
            let x = b.logits() / 0.8;
            let bound = -(4.0 - x.max());
            x.keep(x.gt(bound)).draw(Source::SEED)
        });
        assert_eq!(of_size(12, 2), expected);
        assert_eq!(expected.operations.len(), 12);
    }

    #[test]
    fn a_made_up_program_has_the_size_that_is_asked_for() {
        for n in 1..=DEPTH_MAX {
            for n_operations in [n_operations_min(n), n_operations_min(n) + 1, N_OPERATIONS_MAX] {
                let definition = of_size(n_operations, n);
                assert_eq!((definition.operations.len(), n_reductions(&definition)), (n_operations, n));
                match Program::new(definition, SHAPE) {
                    Ok(program) => assert!(program.cost() >= n as f32),
                    Err(error) => assert!(matches!(error, ProgramError::TooCostly { .. }), "{error}"),
                }
            }
            assert!(Program::new(of_size(n_operations_min(n), n), SHAPE).is_ok(), "{n} reductions");
        }
    }

    #[test]
    fn every_sampler_runs_over_the_rows_of_a_model() {
        for Named { name, write, .. } in NAMED {
            Program::new(Definition::build(write), SHAPE).unwrap_or_else(|error| panic!("{name}: {error}"));
        }
    }

    #[test]
    fn the_help_has_samplers_with_their_numbers() {
        let help = help();
        for line in
            ["\n  greedy\n", "\n  typical              0.9\n", "\n  mirostat             tau 5, eta 0.1\n"]
        {
            assert!(help.contains(line), "{line:?} in {help}");
        }
    }
}
