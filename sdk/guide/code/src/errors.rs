//! Errors and panics.

use trellis_guest::{Context, Error, Result, Sampler};

// ANCHOR: full
/// Goes on where there is room, and starts over with the last half where there is none.
pub fn appended(context: &Context, text: &str) -> Result<u32> {
    match context.append_text(text) {
        Err(Error::ContextFull { .. }) => {
            let half = context.tokens_from(context.length() / 2);
            context.set_tokens(&half)?;
            context.append_text(text)
        }
        result => result,
    }
}
// ANCHOR_END: full

// ANCHOR: retry
/// A token, asked for once more where a step failed.
pub fn stepped(context: &Context, sampler: &Sampler) -> Result<trellis_guest::Candidate> {
    match context.step(sampler) {
        Err(error) if error.is_retryable() => context.step(sampler),
        result => result,
    }
}
// ANCHOR_END: retry

#[cfg(test)]
mod tests {
    use super::*;
    use trellis_guest::{Model, Token};

    // ANCHOR: texts
    #[test]
    fn an_error_names_the_value_and_the_limit() -> Result {
        let model = Model::open_default()?;
        let context = model.context()?;
        let empty = context.step(&Sampler::greedy()).expect_err("there is nothing to continue");
        assert_eq!(empty.to_string(), "the context is empty; append at least one token first");
        context.append_text("Once")?;
        let many = context.top(5000).expect_err("there are fewer");
        assert_eq!(many.to_string(), "n is 5000, expected 1 to 1024");
        let unknown = Model::open("large").expect_err("it is not loaded");
        assert_eq!(unknown.to_string(), "no model is called \"large\"; loaded: tiny");
        Ok(())
    }
    // ANCHOR_END: texts

    #[test]
    fn a_full_context_begins_anew() -> Result {
        let model = Model::open_default()?;
        let context = model.context()?;
        let token: Token = model.encode("a")?[0];
        context.append(&vec![token; context.capacity() as usize])?;
        assert!(context.append(&[token]).is_err());
        appended(&context, " and on")?;
        assert!(context.length() < context.capacity());
        stepped(&context, &Sampler::greedy())?;
        Ok(())
    }
}
