//! The code in the guide: a module for each chapter, with the tests of what the chapter says.

pub mod beams;
pub mod constraints;
pub mod errors;
pub mod eviction;
mod first_guest;
pub mod forks;
pub mod looking;
pub mod mixtures;
pub mod particles;
pub mod prompts;
pub mod samplers;
pub mod session;
pub mod speculation;
pub mod speeds;

/// A context that holds a question, in the chat template of the default model.
///
/// # Errors
/// Those of [`Context::set_chat`](trellis_guest::Context::set_chat).
#[cfg(test)]
fn asked(question: &str) -> trellis_guest::Result<trellis_guest::Context> {
    let context = trellis_guest::Model::open_default()?.context()?;
    context.set_chat(&trellis_guest::Chat::new().user(question))?;
    Ok(context)
}

/// A context that holds the beginning of a text.
///
/// # Errors
/// As [`asked`].
#[cfg(test)]
fn begun(text: &str) -> trellis_guest::Result<trellis_guest::Context> {
    prompts::continued(&trellis_guest::Model::open_default()?, text)
}
