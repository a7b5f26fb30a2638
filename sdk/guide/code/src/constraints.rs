//! Constraints.

use serde::Deserialize;
use trellis_guest::{Beginning, Chat, Constraint, Context, Error, Model, Result, Sampler};

// ANCHOR: schema
/// What is read out of a sentence.
#[derive(Debug, Deserialize)]
pub struct Person {
    /// The name.
    pub name: String,
    /// In years.
    pub age: u32,
}

const PERSON: &str = r#"{"type": "object", "properties": {
    "name": {"type": "string", "maxLength": 20},
    "age": {"type": "integer", "minimum": 0, "maximum": 120}
}, "required": ["name", "age"], "additionalProperties": false}"#;

/// A person, however hot it is drawn.
pub fn person(sentence: &str, temperature: f32, seed: u64) -> Result<Person> {
    let model = Model::open_default()?;
    let constraint = Constraint::json_schema(&model, PERSON)?;
    let sampler = Sampler::seeded(seed).temperature(temperature).constraint(&constraint).build()?;
    let context = model.context()?;
    context.set_chat(&Chat::new().user(sentence))?;
    let answer = context.generate(&sampler).max_tokens(120).run()?;
    serde_json::from_str(&answer.text).map_err(|error| Error::InvalidArgument {
        name: "answer".to_owned(),
        value: answer.text.clone(),
        expected: error.to_string(),
    })
}
// ANCHOR_END: schema

// ANCHOR: after
/// Thinks as it likes, and then says nothing but a number.
pub fn number_after_thoughts(context: &Context) -> Result<String> {
    let number = Constraint::regex(context.model(), " [0-9]+")?;
    let sampler = Sampler::greedy();
    sampler.set_constraint(Some(&number), &Beginning::AfterText("Answer:".to_owned()))?;
    Ok(context.generate(&sampler).max_tokens(120).run()?.text)
}
// ANCHOR_END: after

#[cfg(test)]
mod tests {
    use super::*;
    use crate::asked;

    #[test]
    fn what_comes_is_of_the_schema() -> Result {
        for seed in 0..4 {
            let person = person("Ada, a pilot from Oslo, is 36.", 1.5, seed)?;
            assert!(person.name.chars().count() <= 20 && person.age <= 120, "{person:?}");
        }
        Ok(())
    }

    #[test]
    fn thoughts_are_free_and_the_answer_is_not() -> Result {
        let text = number_after_thoughts(&asked("Think step by step: what is 468 + 275?")?)?;
        assert!(text.starts_with("ones: 8 + 5") && text.trim_end().ends_with("Answer: 743"), "{text}");
        Ok(())
    }

    // ANCHOR: refused
    #[test]
    fn what_is_not_supported_is_refused_by_its_name() -> Result {
        let model = Model::open_default()?;
        let refused = Constraint::json_schema(&model, r#"{"not": {}}"#).expect_err("it has `not`");
        assert!(
            matches!(&refused, Error::GrammarRefused { reason, .. } if reason.contains("not")),
            "{refused}"
        );
        Ok(())
    }
    // ANCHOR_END: refused
}
