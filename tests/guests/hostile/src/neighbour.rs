//! Well-behaved work, to be compared with what it is undisturbed.

use trellis_guest::{
    Context, Error, Model, Sampler, emit, emit_tokens, forget, generate_all, messages, receive, seed,
    step_all,
};

use crate::Outcome;

/// `tokens N PROMPT`: each token of a seeded stream by itself.
pub(crate) fn tokens(arguments: &[String]) -> Outcome {
    let [n, prompt] = arguments else { return Err("tokens N PROMPT".into()) };
    let context = Model::open_default()?.context()?;
    context.append_markup(prompt)?;
    let sampler = Sampler::seeded(seed()).temperature(0.9).top_p(0.95).build()?;
    for drawn in context.stream(&sampler).stop_tokens(&[]).max_tokens(n.parse()?).open()? {
        emit_tokens(&[drawn?.token])?;
    }
    Ok(())
}

/// `forks N TOKENS PROMPT`: so many forks of a prompt, so many tokens each, by each way of decoding; half of
/// them before a message comes.
pub(crate) fn forks(arguments: &[String]) -> Outcome {
    let [n, n_tokens, prompt] = arguments else { return Err("forks N TOKENS PROMPT".into()) };
    let (n, n_tokens): (u64, u32) = (n.parse()?, n_tokens.parse()?);
    let root = Model::open_default()?.context()?;
    root.append_markup(prompt)?;
    let n_prompt = root.length();
    let forks = (0..n).map(|_| root.fork()).collect::<Result<Vec<_>, _>>()?;
    let base = Sampler::seeded(seed()).build()?;
    let samplers: Vec<Sampler> = (0..n).map(|i| base.with_seed(seed() + i)).collect();

    for _ in 0..n_tokens / 2 {
        step_all(forks.iter().zip(&samplers))?;
    }
    emit(".")?;
    receive()?;
    let (streamed, generated) = forks.split_at(forks.len() / 2);
    for (fork, sampler) in streamed.iter().zip(&samplers) {
        let n_left = n_prompt + n_tokens - fork.length();
        for drawn in fork.stream(sampler).stop_tokens(&[]).max_tokens(n_left).open()? {
            drawn?;
        }
    }
    let samplers = &samplers[streamed.len()..];
    let rest = |fork: &Context| n_prompt + n_tokens - fork.length();
    generate_all(
        generated
            .iter()
            .zip(samplers)
            .map(|(fork, sampler)| fork.generate(sampler).stop_tokens(&[]).max_tokens(rest(fork))),
    )?;
    for fork in &forks {
        emit_tokens(&fork.tokens_from(n_prompt))?;
    }
    Ok(())
}

/// Decodes for ever, on two contexts.
pub(crate) fn endless() -> Outcome {
    let root = Model::open_default()?.context()?;
    root.append_markup("<|begin_of_text|>Once upon a time")?;
    let sampler = Sampler::seeded(seed()).build()?;
    loop {
        let fork = root.fork()?;
        for drawn in fork.stream(&sampler).stop_tokens(&[]).max_tokens(500).open()? {
            emit_tokens(&[drawn?.token])?;
        }
    }
}

/// `paced N`: so many tokens of a fork again and again, the same ones each time, each by itself.
pub(crate) fn paced(arguments: &[String]) -> Outcome {
    let [n] = arguments else { return Err("paced N".into()) };
    let n: u32 = n.parse()?;
    let root = Model::open_default()?.context()?;
    root.append_markup("<|begin_of_text|>Once upon a time")?;
    let sampler = Sampler::seeded(seed()).temperature(0.9).top_p(0.95).build()?;
    loop {
        let fork = root.fork()?;
        for drawn in fork.stream(&sampler).stop_tokens(&[]).max_tokens(n).open()? {
            emit_tokens(&[drawn?.token])?;
        }
    }
}

/// Encodes what it is sent, and says how many tokens that are.
pub(crate) fn encode() -> Outcome {
    let model = Model::open_default()?;
    for message in messages() {
        emit(&model.encode(&message?)?.len().to_string())?;
    }
    Ok(())
}

/// Sends back what it is sent.
pub(crate) fn echo() -> Outcome {
    for message in messages() {
        emit(&message?)?;
    }
    Ok(())
}

/// `puppet MODEL`: holds a context of a model, and at its client's word panics, fails, or wants more of the model.
pub(crate) fn puppet(arguments: &[String]) -> Outcome {
    let [name] = arguments else { return Err("puppet MODEL".into()) };
    let model = Model::open(name)?;
    let _held = model.context()?;
    match receive()?.as_deref() {
        Some("panic") => panic!("the guest was told to"),
        Some("fail") => Err("the guest was told to".into()),
        Some("context") => Ok(model.context().map(drop)?),
        Some("model") => Ok(Model::open(name).map(drop)?),
        _ => Ok(()),
    }
}

/// `visitor MODEL`: looks at a model and has nothing more of it, then answers one message and goes.
pub(crate) fn visitor(arguments: &[String]) -> Outcome {
    let [name] = arguments else { return Err("visitor MODEL".into()) };
    emit(&Model::open(name)?.info().name)?;
    match receive()? {
        Some(message) => Ok(emit(&message)?),
        None => Ok(()),
    }
}

/// Forgets what is saved under a name, without a model.
pub(crate) fn forget_saved(arguments: &[String]) -> Outcome {
    let [name] = arguments else { return Err("forget-saved NAME".into()) };
    Ok(forget(name)?)
}

/// Does with saved contexts what each message says and answers it with a line: `save NAME TEXT`, `forget NAME`, or `open NAME`,
/// which first sends the tokens of the context and four that the model draws after them.
pub(crate) fn keep() -> Outcome {
    let model = Model::open_default()?;
    let greedy = Sampler::greedy();
    for message in messages() {
        let message = message?;
        match message.splitn(3, ' ').collect::<Vec<_>>()[..] {
            ["save", name, text] => {
                let context = model.context()?;
                context.append_markup(text)?;
                context.prefill()?;
                context.save(name)?;
                emit("saved")?;
            }
            ["open", name] => match model.saved_context(name) {
                Ok(context) => {
                    context.generate(&greedy).stop_tokens(&[]).max_tokens(4).run()?;
                    emit_tokens(&context.tokens())?;
                    emit("opened")?;
                }
                Err(Error::NotFound { .. }) => emit("none")?,
                Err(error) => return Err(error.into()),
            },
            ["forget", name] => {
                forget(name)?;
                emit("forgotten")?;
            }
            _ => return Err("save NAME TEXT, open NAME or forget NAME".into()),
        }
    }
    Ok(())
}
