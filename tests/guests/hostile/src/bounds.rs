//! Every way to draw tokens, and every way to force some that are wanted.

use trellis_guest::programs::{Definition, MaskId, Source, TokenBias, library};
use trellis_guest::{
    Constraint, Context, GuessTree, Guesses, Mixture, Model, Particles, Result, Sampler, Token, TokenMask,
    emit_json, generate_all, generate_each, step_all,
};

use crate::Outcome;

/// Tokens of each way.
const N_TOKENS: u32 = 24;

/// What came of a way: the tokens that it drew, or the error.
type Drawn = Result<Vec<Token>>;

struct Ways {
    model: Model,
    prompt: Context,
    /// Tokens that are wanted.
    wanted: Vec<Token>,
    others: TokenMask,
    only: TokenMask,
}

/// `every-draw LETTER`: draws in every way there is, and tries to get tokens with that letter; emits what came of each.
pub(crate) fn every_draw(arguments: &[String]) -> Outcome {
    let letter = arguments.first().and_then(|text| text.bytes().next()).ok_or("a letter is needed")?;
    let model = Model::open_default()?;
    let prompt = model.context()?;
    prompt.append(model.info().bos_token.as_slice())?;
    prompt.append_text("Once upon a time")?;
    prompt.prefill()?;
    let has = |text: &[u8]| text.contains(&letter);
    let wanted: Vec<Token> =
        (0..).zip(model.vocabulary()?.iter()).filter(|(_, text)| has(text)).map(|(token, _)| token).collect();
    let only = TokenMask::allow(&model, &wanted)?;
    let others = TokenMask::forbid(&model, &wanted)?;
    let ways = Ways { model, prompt, wanted, others, only };
    let tell = |way: &str, drawn: Drawn| {
        let (tokens, error) = match drawn {
            Ok(tokens) => (tokens, None),
            Err(error) => (Vec::new(), Some(error.to_string())),
        };
        emit_json(&(way, tokens, error))
    };
    for (way, draw) in WAYS {
        tell(way, draw(&ways))?;
    }
    for (way, sampler) in SAMPLERS {
        tell(way, sampler(&ways).and_then(|sampler| ways.generated(&sampler)))?;
        // Programs and masks draw elsewhere where tokens are guessed, and where they are drawn one by one.
        tell(&format!("{way}, stepping"), sampler(&ways).and_then(|sampler| ways.stepped(&sampler)))?;
        tell(&format!("{way}, guessed"), sampler(&ways).and_then(|sampler| ways.guessed(&sampler)))?;
    }
    Ok(())
}

type Way = fn(&Ways) -> Drawn;

const WAYS: &[(&str, Way)] = &[
    ("streams", |ways| {
        let fork = ways.prompt.fork()?;
        let sampler = Sampler::seeded(1).temperature(1.5).build()?;
        let stream = fork.stream(&sampler).max_tokens(N_TOKENS).stop_tokens(&[]).open()?;
        stream.map(|drawn| drawn.map(|candidate| candidate.token)).collect()
    }),
    ("together", |ways| {
        let sampler = Sampler::seeded(2).temperature(1.5).build()?;
        let forks = ways.prompt.forks(4, &sampler)?;
        let mut tokens = Vec::new();
        for _ in 0..N_TOKENS / 4 {
            tokens.extend(
                step_all(forks.iter().map(|(fork, sampler)| (fork, sampler)))?.iter().map(|it| it.token),
            );
        }
        Ok(tokens)
    }),
    ("generations", |ways| {
        let sampler = Sampler::seeded(3).temperature(1.5).build()?;
        let forks = ways.prompt.forks(3, &sampler)?;
        let requests = || {
            forks
                .iter()
                .map(|(fork, sampler)| fork.generate(sampler).max_tokens(N_TOKENS / 3).stop_tokens(&[]))
        };
        let mut tokens: Vec<Token> = generate_all(requests())?.into_iter().flat_map(|it| it.tokens).collect();
        for ended in generate_each(requests())? {
            tokens.extend(ended.completion?.tokens);
        }
        Ok(tokens)
    }),
    ("particles", |ways| {
        let mut particles = Particles::new(&ways.prompt, &Sampler::seeded(4).temperature(1.5).build()?, 6)?;
        let mut tokens = Vec::new();
        for _ in 0..4 {
            tokens.extend(particles.step(|_| true)?.into_iter().map(|(_, drawn)| drawn.token));
            particles.resample()?;
        }
        Ok(tokens)
    }),
    ("beams", |ways| ways.beams(None)),
    ("beams of groups", |ways| {
        let beams = ways.prompt.beams(4).groups(2, 0.7).max_tokens(12).stop_tokens(&[]);
        Ok(beams.run(4)?.into_iter().flat_map(|it| it.tokens).collect())
    }),
    ("beams by a bias", |ways| {
        ways.beams(Some(
            &Sampler::seeded(5)
                .temperature(0.0)
                .bias(ways.wanted.iter().take(1000).map(|&it| (it, 1e9)))
                .build()?,
        ))
    }),
    ("beams by a mask", |ways| {
        let sampler = Sampler::greedy();
        sampler.set_mask(Some(&ways.only))?;
        ways.beams(Some(&sampler))
    }),
    ("beams by a constraint", |ways| {
        let words = Constraint::regex(&ways.model, "[a-z ]{1,200}")?;
        ways.beams(Some(&Sampler::seeded(5).temperature(0.0).constraint(&words).build()?))
    }),
    ("a mixture", |ways| {
        let sampler = ways
            .by(Definition::build(|b| library::guidance(b.logits(), b.member(0), 1.5).draw(Source::SEED)))?;
        let (one, other) = (ways.prompt.fork()?, ways.prompt.fork()?);
        Ok(Mixture::of(&one, [&other]).generate(&sampler).max_tokens(N_TOKENS).stop_tokens(&[]).run()?.tokens)
    }),
    ("a mixture, stepping", |ways| {
        let sampler = ways.by(Definition::build(|b| b.member(0).draw(Source::SEED)))?;
        let (one, other) = (ways.prompt.fork()?, ways.prompt.fork()?);
        let mixture = Mixture::of(&one, [&other]);
        (0..N_TOKENS).map(|_| Ok(mixture.step(&sampler)?.token)).collect()
    }),
    ("a mixture of two models", |ways| {
        let sampler = ways.by(Definition::build(|b| {
            library::contrastive(b.logits(), b.member(0), 0.1, 0.5).draw(Source::SEED)
        }))?;
        let other = Model::open("draft")?.context()?;
        other.set_tokens(&ways.prompt.tokens())?;
        let one = ways.prompt.fork()?;
        Ok(Mixture::of(&one, [&other]).generate(&sampler).max_tokens(N_TOKENS).stop_tokens(&[]).run()?.tokens)
    }),
    ("guesses of a draft", |ways| {
        let small = Model::open("draft")?;
        let sampler = Sampler::seeded(6).temperature(0.8).build()?;
        let request = ways.prompt.fork()?;
        let request = request.generate(&sampler).guess_by(Guesses::draft(&small)).max_tokens(N_TOKENS);
        Ok(request.stop_tokens(&[]).run()?.tokens)
    }),
    ("a constraint that wants them", |ways| {
        let word = String::from_utf8_lossy(&ways.model.vocabulary()?[ways.wanted[0] as usize]).into_owned();
        let choice = Constraint::choice(&ways.model, [word])?;
        ways.generated(&Sampler::seeded(7).constraint(&choice).build()?)
    }),
    ("a constraint that forces most", |ways| {
        let schema = r#"{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"], "additionalProperties": false}"#;
        let object = Constraint::json_schema(&ways.model, schema)?;
        ways.generated(&Sampler::seeded(8).temperature(1.5).constraint(&object).build()?)
    }),
];

type Make = fn(&Ways) -> Result<Sampler>;

const SAMPLERS: &[(&str, Make)] = &[
    ("greedy", |_| Ok(Sampler::greedy())),
    ("hot", |_| Sampler::seeded(9).temperature(2.5).build()),
    ("truncated", |_| {
        Sampler::seeded(10).temperature(1.5).top_k(40).top_p(0.9).min_p(0.01).repetition_penalty(1.2).build()
    }),
    ("penalties", |_| {
        Sampler::seeded(11)
            .temperature(0.9)
            .frequency_penalty(0.4)
            .presence_penalty(0.3)
            .penalty_last_n(40)
            .build()
    }),
    ("a bias", |ways| Sampler::seeded(12).bias(ways.wanted.iter().take(1000).map(|&it| (it, 1e9))).build()),
    ("a bias of others", |ways| Sampler::seeded(12).bias_where(&ways.others, f32::NEG_INFINITY).build()),
    ("a mask", |ways| {
        let sampler = Sampler::seeded(13).build()?;
        sampler.set_mask(Some(&ways.only))?;
        Ok(sampler)
    }),
    ("a program", |ways| ways.by(Definition::build(|b| library::top_p(b.logits(), 0.95).draw(Source::SEED)))),
    ("a program of a constant row", |ways| {
        ways.by(Definition::build(|b| b.mask(MaskId(0)).row().draw(Source::SEED)))
    }),
    ("a program of one token", |ways| {
        ways.by(Definition::build(|b| b.parameter_token(0).only().row().ln().argmax()))
    }),
    ("a program that names a token", |ways| ways.by(Definition::build(|b| b.parameter_token(0)))),
    ("a program with a bias", |ways| {
        ways.by(Definition::build(|b| (b.logits() + b.bias(trellis_guest::programs::BiasId(0))).argmax()))
    }),
    ("a program of a member that is not there", |ways| {
        ways.by(Definition::build(|b| b.member(0).draw(Source::SEED)))
    }),
    ("a program with state", |ways| {
        ways.by(Definition::build(|b| {
            let n = b.state(0.5);
            n.set(n.get() + 0.05);
            (b.logits() * n.get()).draw(Source::SEED)
        }))
    }),
    ("a program with a constraint", |ways| {
        let sampler = ways.by(Definition::build(|b| {
            b.constraint().select(b.logits(), b.logits() + 1e9).draw(Source::SEED)
        }))?;
        let words = Constraint::regex(&ways.model, "[a-z ]{1,300}")?;
        sampler.set_constraint(Some(&words), &trellis_guest::Beginning::FirstDraw)?;
        Ok(sampler)
    }),
    ("a constraint", |ways| {
        let words = Constraint::regex(&ways.model, "[a-z ]{1,300}")?;
        Sampler::seeded(14).temperature(1.5).constraint(&words).build()
    }),
];

impl Ways {
    fn by(&self, definition: Definition) -> Result<Sampler> {
        let sampler = Sampler::by_program(&self.model.program(&definition)?, 15)?;
        let entries: Vec<(Token, f32)> = self.wanted.iter().map(|&token| (token, 1e9)).collect();
        sampler.set_parameters(&[self.wanted[0] as f32])?;
        sampler.set_program_masks(&[&self.only])?;
        sampler.set_program_biases(&[&TokenBias::sparse(&self.model, &entries)?])?;
        Ok(sampler)
    }

    fn generated(&self, sampler: &Sampler) -> Drawn {
        let fork = self.prompt.fork()?;
        Ok(fork.generate(sampler).max_tokens(N_TOKENS).stop_tokens(&[]).run()?.tokens)
    }

    /// Up to a token that ends the text: after it a constraint lets nothing follow.
    fn stepped(&self, sampler: &Sampler) -> Drawn {
        let fork = self.prompt.fork()?;
        let mut tokens = Vec::new();
        while tokens.len() < N_TOKENS as usize / 2 && !self.is_ended(&tokens) {
            tokens.push(fork.step(sampler)?.token);
        }
        Ok(tokens)
    }

    fn is_ended(&self, tokens: &[Token]) -> bool {
        tokens.iter().any(|&token| self.model.is_stop(token))
    }

    /// Of chains and trees of what is wanted, and of what the model would say; as far as [`Self::stepped`].
    fn guessed(&self, sampler: &Sampler) -> Drawn {
        let fork = self.prompt.fork()?;
        let mut tokens = Vec::new();
        for _ in 0..N_TOKENS / 4 {
            let mut guess: Vec<Token> = fork.top(2)?.candidates.iter().map(|it| it.token).collect();
            guess.extend(self.wanted.iter().take(3));
            tokens.extend(fork.speculate(sampler, &guess)?.iter().map(|it| it.token));
            if self.is_ended(&tokens) {
                break;
            }
            let mut tree = GuessTree::new();
            for token in guess {
                let node = tree.add(None, token);
                tree.add(Some(node), self.wanted[0]);
            }
            tokens.extend(fork.speculate_tree(sampler, &tree)?.iter().map(|it| it.token));
            if self.is_ended(&tokens) {
                break;
            }
        }
        Ok(tokens)
    }

    fn beams(&self, sampler: Option<&Sampler>) -> Drawn {
        let beams = self.prompt.beams(4).max_tokens(12).stop_tokens(&[]);
        let beams = match sampler {
            Some(sampler) => beams.by(sampler),
            None => beams,
        };
        Ok(beams.run(4)?.into_iter().flat_map(|it| it.tokens).collect())
    }
}
