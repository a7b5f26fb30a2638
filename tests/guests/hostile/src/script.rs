//! Calls of the host that bytes say, for fuzzers: right ones, wrong ones, in any order and with anything still open.

use trellis_guest::programs::{Definition, Source, TokenBias, library};
use trellis_guest::{
    BeamSearch, Beginning, Chat, ChatEnd, Constraint, Context, Error, Generations, GuessTree, Guesses, Kept,
    LogLevel, Mixture, Model, Pooling, Positions, Result, Sampler, Steering, Token, TokenMask, TokenStream,
    emit, emit_tokens, forget, generate_all, generate_each, log, score_all, step_all, top_all, try_receive,
    usage,
};

use crate::Outcome;

/// Of each kind of thing it holds so many; the next one takes the place of one of them.
const N_HELD_MAX: usize = 6;
/// The most tokens of one call that draws them.
const N_TOKENS_MAX: u32 = 12;

/// `script HEX`: does what the bytes say, and emits how many calls there were and how many of them were refused.
pub(crate) fn script(arguments: &[String]) -> Outcome {
    let [hex] = arguments else { return Err("script HEX".into()) };
    let digits: Vec<char> = hex.chars().collect();
    let byte = |pair: &[char]| u8::from_str_radix(&pair.iter().collect::<String>(), 16);
    let bytes = digits.chunks(2).map(byte).collect::<std::result::Result<Vec<u8>, _>>()?;
    let mut script = Script::new(bytes)?;
    let (mut n_calls, mut n_refused) = (0, 0);
    while !script.bytes.is_empty() {
        n_calls += 1;
        match script.call() {
            Ok(()) => {}
            // Nothing that a script calls is to do any harm.
            Err(error @ (Error::EngineFailed { .. } | Error::Cancelled)) => return Err(error.into()),
            Err(_) => n_refused += 1,
        }
    }
    Ok(emit(&format!("{n_calls} {n_refused}"))?)
}

/// Names under which contexts are saved.
const N_NAMES: u8 = 3;

fn saved(name: u8) -> String {
    format!("saved {name}")
}

/// Things of one kind.
#[derive(Debug)]
struct Held<T>(Vec<T>);

impl<T> Held<T> {
    fn put(&mut self, thing: T, place: usize) {
        match self.0.len() {
            N_HELD_MAX => self.0[place % N_HELD_MAX] = thing,
            _ => self.0.push(thing),
        }
    }

    fn at(&self, place: usize) -> Result<&T> {
        self.0.get(place % self.0.len().max(1)).ok_or_else(nothing_there)
    }

    fn at_mut(&mut self, place: usize) -> Result<&mut T> {
        let n = self.0.len().max(1);
        self.0.get_mut(place % n).ok_or_else(nothing_there)
    }

    fn drop_one(&mut self, place: usize) {
        if !self.0.is_empty() {
            drop(self.0.swap_remove(place % self.0.len()));
        }
    }
}

/// As if the host had refused.
fn nothing_there() -> Error {
    Error::NotFound { name: "a thing of that kind".to_owned() }
}

struct Script {
    bytes: std::collections::VecDeque<u8>,
    models: Vec<Model>,
    contexts: Held<Context>,
    samplers: Held<Sampler>,
    streams: Held<TokenStream>,
    searches: Held<BeamSearch>,
    generations: Held<Generations>,
    masks: Held<TokenMask>,
    biases: Held<TokenBias>,
    constraints: Held<Constraint>,
}

impl Script {
    fn new(bytes: Vec<u8>) -> Result<Self> {
        let models = vec![Model::open_default()?, Model::open("draft")?];
        for name in 0..N_NAMES {
            // What a script before has left would change what this one does.
            let _ = forget(&saved(name));
        }
        let context = models[0].context()?;
        context.append_markup("<|begin_of_text|>Once upon a time")?;
        Ok(Self {
            bytes: bytes.into(),
            models,
            contexts: Held(vec![context]),
            samplers: Held(vec![Sampler::greedy()]),
            streams: Held(Vec::new()),
            searches: Held(Vec::new()),
            generations: Held(Vec::new()),
            masks: Held(Vec::new()),
            biases: Held(Vec::new()),
            constraints: Held(Vec::new()),
        })
    }

    fn byte(&mut self) -> u8 {
        self.bytes.pop_front().unwrap_or(0)
    }

    fn place(&mut self) -> usize {
        self.byte().into()
    }

    /// Small mostly, and anything now and then.
    fn number(&mut self) -> u32 {
        match self.byte() {
            255 => u32::MAX,
            254 => u32::from_le_bytes([self.byte(), self.byte(), self.byte(), self.byte()]),
            n @ 200.. => u32::from(n - 200) * 64,
            n => n.into(),
        }
    }

    fn few(&mut self) -> u32 {
        u32::from(self.byte()) % (N_TOKENS_MAX + 1)
    }

    fn float(&mut self) -> f32 {
        match self.byte() {
            255 => f32::from_le_bytes([self.byte(), self.byte(), self.byte(), self.byte()]),
            254 => f32::NAN,
            253 => f32::INFINITY,
            252 => f32::NEG_INFINITY,
            n => f32::from(n) / 64.0 - 0.5,
        }
    }

    fn floats(&mut self) -> Vec<f32> {
        (0..self.byte() % 20).map(|_| self.float()).collect()
    }

    /// Of the vocabulary mostly.
    fn token(&mut self) -> Token {
        match self.byte() {
            255 => self.number(),
            n => u32::from(n) * 16 + u32::from(self.byte() % 16),
        }
    }

    fn tokens(&mut self) -> Vec<Token> {
        (0..self.byte() % 40).map(|_| self.token()).collect()
    }

    fn text(&mut self) -> String {
        let bytes: Vec<u8> = (0..self.byte() % 32).map(|_| self.byte()).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    fn model(&mut self) -> Model {
        let place = self.place();
        self.models[place % self.models.len()].clone()
    }

    fn call(&mut self) -> Result {
        match self.byte() % 14 {
            0 => self.make_context(),
            1 | 2 => self.change(),
            3 | 4 => self.draw(),
            5 => self.look(),
            6 => self.make_sampler(),
            7 => self.set_sampler(),
            8 => self.stream(),
            9 => self.search(),
            10 => self.generate(),
            11 => self.make_others(),
            12 => self.let_go(),
            _ => self.session(),
        }
    }

    fn make_context(&mut self) -> Result {
        let (how, model, place) = (self.byte() % 6, self.model(), self.place());
        let name = saved(self.byte() % N_NAMES);
        let context = match how {
            0 => model.context()?,
            1 => model.saved_context(&name)?,
            2 => return self.contexts.at(place)?.save(&name),
            3 => return forget(&name),
            _ => self.contexts.at(place)?.fork()?,
        };
        self.contexts.put(context, place);
        Ok(())
    }

    fn change(&mut self) -> Result {
        let (how, place) = (self.byte() % 9, self.place());
        let (start, n, tokens, text) = (self.number(), self.number(), self.tokens(), self.text());
        let context = self.contexts.at(place)?;
        match how {
            0 | 1 => context.append(&tokens),
            2 => context.append_text(&text).map(drop),
            3 => context.append_markup(&text).map(drop),
            4 => context.truncate(n),
            5 => context.evict(start, start.saturating_add(n), Positions::Keep),
            6 => context.evict(start, start.saturating_add(n), Positions::CloseUp),
            7 => context.set_tokens(&tokens),
            _ => {
                let values = self.floats();
                let context = self.contexts.at(place)?;
                let hidden_size = context.model().info().hidden_size as usize;
                let values = values.iter().copied().cycle().take(hidden_size).collect();
                context.steer(&Steering::none().and(n, values), start)
            }
        }
    }

    fn draw(&mut self) -> Result {
        let (how, one, other, sampler) = (self.byte() % 7, self.place(), self.place(), self.place());
        let tokens = self.tokens();
        let sampler = self.samplers.at(sampler)?;
        let (one, other) = (self.contexts.at(one)?, self.contexts.at(other)?);
        match how {
            0 | 1 => one.step(sampler).map(drop),
            2 => step_all([(one, sampler), (other, sampler)]).map(drop),
            3 => one.speculate(sampler, &tokens).map(drop),
            4 => {
                let mut tree = GuessTree::new();
                let mut behind = None;
                for (idx, &token) in tokens.iter().enumerate() {
                    let node = tree.add(behind, token);
                    behind = (idx % 3 != 2).then_some(node);
                }
                one.speculate_tree(sampler, &tree).map(drop)
            }
            5 => Mixture::of(one, [other]).step(sampler).map(drop),
            _ => step_all(self.contexts.0.iter().map(|context| (context, sampler))).map(drop),
        }
    }

    fn look(&mut self) -> Result {
        let (how, one, other, n) = (self.byte() % 13, self.place(), self.place(), self.number());
        let (tokens, start) = (self.tokens(), self.number());
        let (one, other) = (self.contexts.at(one)?, self.contexts.at(other)?);
        match how {
            0 => one.top(n).map(drop),
            1 => top_all([one, other], n).map(drop),
            2 => one.score(&tokens).map(drop),
            3 => score_all([(one, &tokens[..]), (other, &tokens[..])]).map(drop),
            4 => one.tops(&tokens, n).map(drop),
            5 => one.logprobs(&tokens).map(drop),
            6 => one.full().map(drop),
            7 => one.embedding().map(drop),
            8 => one.hidden(&[n, start], Pooling::Last).map(drop),
            9 => one.attention(&[n]).map(drop),
            10 => one.prompt_logprobs(start).map(drop),
            11 => one.prefill(),
            _ => {
                let _ = (one.tokens_from(start), one.reports(), one.length(), one.capacity());
                Ok(())
            }
        }
    }

    fn make_sampler(&mut self) -> Result {
        let (how, place, seed) = (self.byte() % 6, self.place(), self.byte().into());
        let (model, x) = (self.model(), self.float());
        let sampler = match how {
            0 => self.samplers.at(place)?.with_seed(seed),
            1 => Sampler::greedy(),
            2 => {
                let definition = Definition::build(|b| {
                    let mixed = library::guidance(b.logits(), b.member(0), b.parameter(0));
                    library::temperature(mixed, 0.9).draw(Source::SEED)
                });
                Sampler::by_program(&model.program(&definition)?, seed)?
            }
            3 => {
                let definition = Definition::build(|b| {
                    let n = b.state(1.0);
                    n.set(n.get() + b.parameter(0));
                    b.report(n.get());
                    (b.logits() * (b.parameter(1) + x)).draw(Source::SEED)
                });
                Sampler::by_program(&model.program(&definition)?, seed)?
            }
            4 => Sampler::by_program(&model.program(&Definition::build_row(|b| b.logits() * x))?, seed)?,
            _ => Sampler::seeded(seed).temperature(x).build()?,
        };
        self.samplers.put(sampler, place);
        Ok(())
    }

    fn set_sampler(&mut self) -> Result {
        let (how, place, other) = (self.byte() % 14, self.place(), self.place());
        let (x, n, token, floats) = (self.float(), self.number(), self.token(), self.floats());
        let text = self.text();
        let sampler = self.samplers.at(place)?;
        match how {
            0 => sampler.set_temperature(x),
            1 => sampler.set_top_k((n != 1).then_some(n)),
            2 => sampler.set_top_p(Some(x)),
            3 => sampler.set_min_p(Some(x)),
            4 => sampler.set_repetition_penalty(x),
            5 => sampler.set_frequency_penalty(x),
            6 => sampler.set_presence_penalty(x),
            7 => sampler.set_penalty_last_n(Some(n)),
            8 => sampler.set_bias(&[(token, x), (token / 2, 1.0)]),
            9 => sampler.set_mask(self.masks.at(other).ok()),
            10 => sampler.set_parameters(&floats),
            11 => sampler.set_program_masks(&[self.masks.at(other)?]),
            12 => sampler.set_program_biases(&[self.biases.at(other)?]),
            _ => {
                let begins = match n % 4 {
                    0 => Beginning::FirstDraw,
                    1 => Beginning::At(token),
                    2 => Beginning::AfterToken(token),
                    _ => Beginning::AfterText(text),
                };
                sampler.set_constraint(self.constraints.at(other).ok(), &begins)
            }
        }
    }

    fn stream(&mut self) -> Result {
        let (how, place, sampler) = (self.byte() % 7, self.place(), self.place());
        let (n, tokens) = (self.few(), self.tokens());
        if how < 3 {
            let (context, sampler) = (self.contexts.at(place)?, self.samplers.at(sampler)?);
            let options = context.stream(sampler).max_tokens(n).stop_tokens(&tokens);
            let options = match how {
                0 => options,
                1 => options.guess_by(Guesses::lookup()).top(n),
                _ => options.guess_by(Guesses::draft(&self.models[1])),
            };
            let stream = options.open()?;
            self.streams.put(stream, place);
            return Ok(());
        }
        let sampler = self.samplers.at(sampler)?;
        let stream = self.streams.at_mut(place)?;
        match how {
            3 | 4 => stream.take(n as usize).try_for_each(|drawn| drawn.map(drop)),
            5 => stream.guess(&tokens),
            _ => stream.set_sampler(sampler),
        }
    }

    fn search(&mut self) -> Result {
        let (how, place, sampler) = (self.byte() % 6, self.place(), self.place());
        let (n, n_beams, x) = (self.few(), self.number() % 12, self.float());
        if how < 2 {
            let context = self.contexts.at(place)?;
            let beams = context.beams(n_beams).max_tokens(n).length_penalty(x);
            let search = match how {
                0 => beams.open()?,
                _ => beams.groups(2, x).by(self.samplers.at(sampler)?).open()?,
            };
            self.searches.put(search, place);
            return Ok(());
        }
        let search = self.searches.at(place)?;
        match how {
            2 => search.run(),
            3 => search.step().map(drop),
            4 => search.keep((0..n_beams as usize).map(|idx| Kept::live(idx, x))),
            _ => {
                let _ = (search.live(), search.settled(), search.best(n));
                let context = search.take(n)?;
                self.contexts.put(context, place);
                Ok(())
            }
        }
    }

    fn generate(&mut self) -> Result {
        let (how, place, sampler, n) = (self.byte() % 6, self.place(), self.place(), self.few());
        let text = self.text();
        if how >= 4 {
            let generations = self.generations.at_mut(place)?;
            let _ = generations.progress();
            return match how {
                4 => generations.cancel(sampler).map(drop),
                _ => {
                    let _ = generations.reach(n);
                    Ok(())
                }
            };
        }
        let (context, sampler) = (self.contexts.at(place)?, self.samplers.at(sampler)?);
        let request = || context.generate(sampler).max_tokens(n).stop_at(&text);
        match how {
            0 => request().keep_text_only().run().map(drop),
            1 => request().emit().top(n).guess_by(Guesses::lookup()).run().map(drop),
            2 => generate_all([request()]).map(drop),
            _ => {
                let of_all = self.contexts.0.iter().map(|it| it.generate(sampler).max_tokens(n));
                let generations = generate_each(of_all)?;
                self.generations.put(generations, place);
                Ok(())
            }
        }
    }

    fn make_others(&mut self) -> Result {
        let (how, place, model) = (self.byte() % 8, self.place(), self.model());
        let (tokens, text, x) = (self.tokens(), self.text(), self.float());
        match how {
            0 => self.masks.put(TokenMask::allow(&model, &tokens)?, place),
            1 => self.masks.put(TokenMask::forbid(&model, &tokens)?, place),
            2 => {
                let bits: Vec<u64> = tokens.iter().map(|&token| u64::from(token) << 20).collect();
                self.masks.put(TokenMask::from_bits(&model, &bits)?, place);
            }
            3 => {
                let entries: Vec<(Token, f32)> = tokens.iter().map(|&token| (token, x)).collect();
                self.biases.put(TokenBias::sparse(&model, &entries)?, place);
            }
            4 => self.constraints.put(Constraint::regex(&model, &text)?, place),
            5 => self.constraints.put(Constraint::lark(&model, &text)?, place),
            6 => self.constraints.put(Constraint::choice(&model, [text, "yes".to_owned()])?, place),
            _ => {
                let chat = Chat::new().with("user", &text);
                let prompt = model.encode_chat(&chat, ChatEnd::Assistant)?;
                let _ = (model.decode(&prompt)?, model.decode(&tokens)?, model.token_bytes(place as Token)?);
            }
        }
        Ok(())
    }

    fn let_go(&mut self) -> Result {
        let (how, place) = (self.byte() % 9, self.place());
        match how {
            0 => self.contexts.drop_one(place),
            1 => self.samplers.drop_one(place),
            2 => self.streams.drop_one(place),
            3 => self.searches.drop_one(place),
            4 => self.generations.drop_one(place),
            5 => self.masks.drop_one(place),
            6 => self.biases.drop_one(place),
            7 => self.constraints.drop_one(place),
            _ => self.contexts.0.clear(),
        }
        Ok(())
    }

    fn session(&mut self) -> Result {
        let (how, text, tokens) = (self.byte() % 5, self.text(), self.tokens());
        match how {
            0 => emit(&text),
            1 => emit_tokens(&tokens),
            2 => {
                log(LogLevel::Info, &text);
                Ok(())
            }
            3 => try_receive().map(drop),
            _ => {
                let used = usage();
                assert!(used.tokens.used <= used.tokens.limit, "{used:?}");
                Ok(())
            }
        }
    }
}
