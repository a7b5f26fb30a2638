//! How tokens are drawn, and which guest draws them.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::super::exchange::Settings;
use super::super::failure::Failure;
use super::super::fields::Fields;
use super::super::run::Policy;

/// Choices of one request: each is a context of its guest.
pub(super) const N_CHOICES_MAX: u32 = 32;

/// Stop texts of one request, which is what the API takes.
const N_STOPS_MAX: usize = 4;

/// The most of the most probable tokens that may come with each.
pub(super) const N_TOP_MAX: u32 = 20;

/// Fields that change nothing of an answer.
const WITHOUT_EFFECT: [&str; 7] = [
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
];

/// The settings that chat completions and completions have in common; how many tokens and log-probabilities they say
/// each in a way of its own.
pub(super) fn settings(fields: &mut Fields) -> Result<Settings, Failure> {
    fields.pass_over(&WITHOUT_EFFECT);
    Ok(Settings {
        n: fields.count("n", (1, N_CHOICES_MAX))?,
        max_tokens: None,
        stop: stops(fields)?,
        temperature: fields.number("temperature", (0.0, 2.0))?,
        top_p: top_p(fields)?,
        top_k: fields.count("top_k", (1, u32::MAX))?,
        min_p: fields.number("min_p", (0.0, 1.0))?,
        frequency_penalty: fields.number("frequency_penalty", (-2.0, 2.0))?,
        presence_penalty: fields.number("presence_penalty", (-2.0, 2.0))?,
        repetition_penalty: fields.number("repetition_penalty", (0.01, 100.0))?,
        logit_bias: bias(fields)?,
        logprobs: None,
    })
}

/// The API has 0 for what no sampler does: no token at all.
pub(in crate::http) fn top_p(fields: &mut Fields) -> Result<Option<f32>, Failure> {
    Ok(fields.number("top_p", (0.0, 1.0))?.map(|p| p.max(f32::MIN_POSITIVE)))
}

/// The seed, which the API has as any whole number.
pub(in crate::http) fn seed(fields: &mut Fields) -> Result<Option<u64>, Failure> {
    Ok(fields.take::<i64>("seed")?.map(i64::cast_unsigned))
}

fn stops(fields: &mut Fields) -> Result<Vec<String>, Failure> {
    let place = fields.name_of("stop");
    let stops: Vec<String> = match fields.take::<Value>("stop")? {
        None => return Ok(Vec::new()),
        Some(Value::String(text)) => vec![text],
        Some(list) => serde_json::from_value(list).map_err(|_| {
            Failure::invalid(&place, format!("{place} is neither a text nor a list of texts"))
        })?,
    };
    if stops.len() > N_STOPS_MAX {
        let message = format!("{place} has {} texts, expected at most {N_STOPS_MAX}", stops.len());
        return Err(Failure::invalid(&place, message));
    }
    if stops.iter().any(String::is_empty) {
        return Err(Failure::invalid(&place, format!("{place} has an empty text")));
    }
    Ok(stops)
}

fn bias(fields: &mut Fields) -> Result<Vec<(u32, f32)>, Failure> {
    let place = fields.name_of("logit_bias");
    let bias = fields.take::<BTreeMap<String, f32>>("logit_bias")?.unwrap_or_default();
    let one = |(token, bias): (String, f32)| match token.parse() {
        Ok(_) if !(-100.0..=100.0).contains(&bias) => {
            Err(Failure::invalid(&place, format!("{place} of token {token} is {bias}, expected -100 to 100")))
        }
        Ok(token) => Ok((token, bias)),
        Err(_) => Err(Failure::invalid(&place, format!("{place} has {token:?}, which is no token's number"))),
    };
    bias.into_iter().map(one).collect()
}

/// How many tokens of thought an effort is.
pub(super) fn budget_of(effort: &str) -> Option<u32> {
    Some(match effort {
        "none" => 0,
        "minimal" => 64,
        "low" => 256,
        "medium" => 1024,
        "high" => 4096,
        "xhigh" => 16384,
        _ => return None,
    })
}

/// The budget of thought: a number of tokens, or what an effort stands for.
pub(super) fn thinking(fields: &mut Fields, effort: (&str, Option<String>)) -> Result<Option<u32>, Failure> {
    let (place, effort) = effort;
    let budget = fields.count("thinking_budget", (0, u32::MAX))?;
    let of_effort = effort.map(|effort| {
        budget_of(&effort).ok_or_else(|| {
            let message =
                format!("{place} is {effort:?}, expected none, minimal, low, medium, high or xhigh");
            Failure::invalid(place, message)
        })
    });
    Ok(budget.or(of_effort.transpose()?).filter(|&budget| budget > 0))
}

/// Arguments with a text as the last of them. It is never an option of the guest, however it begins.
pub(super) fn with_text(mut args: Vec<String>, text: &str) -> Vec<String> {
    const OPTIONS_END: &str = "--";
    if !args.iter().any(|arg| arg == OPTIONS_END) {
        args.push(OPTIONS_END.to_owned());
    }
    args.push(text.to_owned());
    args
}

/// Which guest decodes: `trellis` with its name, and `args` for one that is started as by `trellis run`.
pub(in crate::http) fn policy(fields: &mut Fields) -> Result<Policy, Failure> {
    let Some(mut named) = fields.object("trellis")? else { return Ok(Policy::Own) };
    let guest: String = named.need("guest")?;
    let args = named.take::<Vec<String>>("args")?;
    named.finish()?;
    Ok(match args {
        Some(args) => Policy::Text(guest, args),
        None => Policy::Named(guest),
    })
}

/// Refuses what a guest that takes arguments would never hear of.
pub(super) fn check_text_policy(
    policy: &Policy,
    settings: &Settings,
    others: &[(&str, bool)],
) -> Result<(), Failure> {
    if !matches!(policy, Policy::Text(..)) {
        return Ok(());
    }
    let said = json!(settings);
    let said = said.as_object().and_then(|said| said.keys().next().cloned());
    let other = others.iter().find(|(_, is_said)| *is_said).map(|(name, _)| (*name).to_owned());
    match said.or(other) {
        Some(name) => {
            Err(Failure::unsupported(name, "a guest that trellis.args are for is told all by those"))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(value: Value) -> Fields {
        Fields::of(value, "").expect("an object")
    }

    #[test]
    fn settings_are_taken_with_their_ranges() {
        let mut all = fields(json!({
            "n": 2, "stop": "END", "temperature": 0.5, "top_p": 0, "logit_bias": { "7": -100 }, "user": "ada", "store": true,
        }));
        let read = settings(&mut all).expect("all are in order");
        assert_eq!((read.n, read.temperature, &read.stop[..]), (Some(2), Some(0.5), &["END".to_owned()][..]));
        assert!(read.top_p.is_some_and(|p| p > 0.0) && read.logit_bias == [(7, -100.0)]);
        all.finish().expect("nothing is left");
        for (value, param) in [
            (json!({ "temperature": 2.5 }), "temperature"),
            (json!({ "stop": ["a", "b", "c", "d", "e"] }), "stop"),
            (json!({ "stop": [""] }), "stop"),
            (json!({ "logit_bias": { "x": 1 } }), "logit_bias"),
            (json!({ "logit_bias": { "1": 101 } }), "logit_bias"),
            (json!({ "n": 33 }), "n"),
        ] {
            assert_eq!(settings(&mut fields(value)).expect_err(param).param.as_deref(), Some(param));
        }
    }

    #[test]
    fn a_guest_is_asked_or_started() {
        let of = |value: Value| policy(&mut fields(value));
        assert_eq!(of(json!({})).expect("none"), Policy::Own);
        let named = of(json!({ "trellis": { "guest": "mine" } })).expect("a guest");
        assert_eq!(named, Policy::Named("mine".to_owned()));
        let started =
            of(json!({ "trellis": { "guest": "best-of-n", "args": ["--n", "4"] } })).expect("a guest");
        assert!(check_text_policy(&named, &Settings::default(), &[("tools", true)]).is_ok());
        assert!(check_text_policy(&started, &Settings::default(), &[("tools", false)]).is_ok());
        let warm = Settings { temperature: Some(1.0), ..Settings::default() };
        let error = check_text_policy(&started, &warm, &[]).expect_err("it is not told");
        assert_eq!(error.param.as_deref(), Some("temperature"));
        let error = of(json!({ "trellis": { "guest": "a", "x": 1 } })).expect_err("x");
        assert_eq!(error.param.as_deref(), Some("trellis.x"));
    }

    #[test]
    fn an_effort_is_a_budget() {
        let of = |budget: Value, effort: Option<&str>| {
            let effort = ("reasoning_effort", effort.map(str::to_owned));
            thinking(&mut fields(json!({ "thinking_budget": budget })), effort)
        };
        assert_eq!(of(Value::Null, Some("low")).expect("known"), Some(256));
        assert_eq!(of(json!(9), Some("low")).expect("known"), Some(9));
        assert_eq!(of(Value::Null, Some("none")).expect("known"), None);
        assert_eq!(
            of(Value::Null, Some("huge")).expect_err("unknown").param.as_deref(),
            Some("reasoning_effort")
        );
    }
}
