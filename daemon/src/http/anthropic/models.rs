//! `/v1/models` in Anthropic's form, for who asks with the header of its versions.

use axum::http::StatusCode;
use reqwest::Url;
use serde_json::{Value, json};
use trellis_client::ModelInfo;

use crate::http::failure::Failure;

/// Models on a page where it is not said how many, and at most.
const N_PER_PAGE: usize = 20;
const N_PER_PAGE_MAX: usize = 1000;

/// The only stage that a model here is in.
const ACTIVE: &str = "active";

/// When a model was released, of which that is not known.
const EPOCH: &str = "1970-01-01T00:00:00Z";

/// A page of the models, under all of their names, as the query of the request asks for it.
///
/// # Errors
/// The query asks for what is not known here, or begins at a model that is not there.
pub(in crate::http) fn page(models: &[ModelInfo], query: &str) -> Result<Value, Failure> {
    let asked = Asked::of(query)?;
    let all: Vec<Value> = if asked.is_active { models.iter().flat_map(shown).collect() } else { Vec::new() };
    let place = |name: &str, id: &str| {
        let missing = || Failure::invalid(name, format!("{name} is {id:?}, which is no model's"));
        all.iter().position(|model| model["id"] == id).ok_or_else(missing)
    };
    let (begin, end, has_more) = match (&asked.after, &asked.before) {
        (_, Some(id)) => {
            let end = place("before_id", id)?;
            let begin = end.saturating_sub(asked.limit);
            (begin, end, begin > 0)
        }
        (after, None) => {
            let begin = after.as_ref().map_or(Ok(0), |id| place("after_id", id).map(|idx| idx + 1))?;
            let end = begin.saturating_add(asked.limit).min(all.len());
            (begin, end, end < all.len())
        }
    };
    let data = &all[begin..end];
    let id = |model: Option<&Value>| model.map(|model| model["id"].clone());
    Ok(
        json!({ "data": data, "has_more": has_more, "first_id": id(data.first()), "last_id": id(data.last()) }),
    )
}

/// The model of a name.
///
/// # Errors
/// There is none.
pub(in crate::http) fn one(models: &[ModelInfo], name: &str) -> Result<Value, Failure> {
    models.iter().flat_map(shown).find(|model| model["id"] == name).ok_or_else(|| {
        let message = format!("no model is called {name:?}");
        Failure::new(StatusCode::NOT_FOUND, "model_not_found", message).about("model")
    })
}

/// A model under each of its names. Of a release, which the API has, nothing is known here.
fn shown(model: &ModelInfo) -> impl Iterator<Item = Value> {
    let n_positions = Some(model.n_positions).filter(|&n| n > 0);
    let names = std::iter::once(&model.name).chain(&model.aliases);
    names.map(move |name| {
        json!({
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": EPOCH,
            "lifecycle": ACTIVE,
            "deprecated_at": null,
            "retires_at": null,
            "line": null,
            "capabilities": null,
            "max_input_tokens": n_positions,
            "max_tokens": n_positions,
        })
    })
}

/// What a query asks for.
#[derive(Debug)]
struct Asked {
    limit: usize,
    after: Option<String>,
    before: Option<String>,
    /// Whether models are asked for that are in use.
    is_active: bool,
}

impl Asked {
    fn of(query: &str) -> Result<Self, Failure> {
        let mut url = Url::parse("http://localhost/").expect("it is an address");
        url.set_query(Some(query));
        let (mut asked, mut stages) =
            (Self { limit: N_PER_PAGE, after: None, before: None, is_active: true }, Vec::new());
        for (name, value) in url.query_pairs() {
            match &*name {
                "limit" => asked.limit = limit(&value)?,
                "after_id" => asked.after = Some(value.into_owned()),
                "before_id" => asked.before = Some(value.into_owned()),
                "lifecycle" | "lifecycle[]" => stages.push(value.into_owned()),
                // The package's clients of what is new say so.
                "beta" => {}
                name => return Err(Failure::unsupported(name, "models are asked for by pages")),
            }
        }
        asked.is_active = stages.is_empty() || stages.iter().any(|stage| stage == ACTIVE);
        Ok(asked)
    }
}

fn limit(text: &str) -> Result<usize, Failure> {
    let limit = text.parse().ok().filter(|limit| (1..=N_PER_PAGE_MAX).contains(limit));
    limit.ok_or_else(|| {
        let message = format!("limit is {text:?}, expected 1 to {N_PER_PAGE_MAX}");
        Failure::invalid("limit", message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn models() -> Vec<ModelInfo> {
        let model = |name: &str, aliases: &[&str]| ModelInfo {
            name: name.to_owned(),
            aliases: aliases.iter().map(|&alias| alias.to_owned()).collect(),
            n_positions: 2048,
            ..ModelInfo::default()
        };
        vec![model("tiny", &["small", "org/a b"]), model("draft", &[])]
    }

    #[test]
    fn pages_follow_each_other_both_ways() {
        let of = |query: &str| {
            let page = page(&models(), query).expect("a page");
            let ids = page["data"].as_array().expect("a list").iter().map(|model| model["id"].clone());
            let ids: Vec<Value> = ids.collect();
            assert_eq!(
                (page["first_id"].clone(), page["last_id"].clone()),
                match &ids[..] {
                    [] => (Value::Null, Value::Null),
                    [first, .., last] => (first.clone(), last.clone()),
                    [only] => (only.clone(), only.clone()),
                }
            );
            (ids, page["has_more"] == true)
        };
        let ids = |ids: &[&str], has_more| (ids.iter().map(|&id| json!(id)).collect::<Vec<_>>(), has_more);
        assert_eq!(of(""), ids(&["tiny", "small", "org/a b", "draft"], false));
        assert_eq!(of("limit=2"), ids(&["tiny", "small"], true));
        assert_eq!(of("limit=2&after_id=small"), ids(&["org/a b", "draft"], false));
        assert_eq!(of("after_id=org%2Fa+b"), ids(&["draft"], false));
        assert_eq!(of("limit=2&before_id=draft"), ids(&["small", "org/a b"], true));
        assert_eq!(of("before_id=tiny&beta=true"), ids(&[], false));
        assert_eq!(of("lifecycle=retired"), ids(&[], false));
        assert_eq!(of("lifecycle%5B%5D=retired&lifecycle%5B%5D=active").0.len(), 4);
    }

    #[test]
    fn what_is_not_known_is_named() {
        for (query, name) in
            [("limit=0", "limit"), ("limit=1001", "limit"), ("after_id=none", "after_id"), ("page=2", "page")]
        {
            let failure = page(&models(), query).expect_err(query);
            assert_eq!((failure.status.as_u16(), failure.param.as_deref()), (400, Some(name)));
        }
        let model = one(&models(), "small").expect("it is there");
        assert_eq!((&model["type"], &model["max_input_tokens"]), (&json!("model"), &json!(2048)));
        assert_eq!(one(&models(), "large").expect_err("none").status, StatusCode::NOT_FOUND);
    }
}
