//! `/v1/models`.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Value, json};
use trellis_client::ModelInfo;

use super::super::failure::Failure;
use super::super::front::Front;
use super::answer_json;
use super::errors::Refused;
use crate::session::Actor;

/// The models that are loaded, and those that are loaded on demand, by all of their names.
pub(in crate::http) async fn list(
    State(front): State<Arc<Front>>,
    Extension(actor): Extension<Actor>,
) -> Result<Response, Refused> {
    let data = known(&front, actor).await?;
    Ok(answer_json(&json!({ "object": "list", "data": data })))
}

/// One of them.
pub(in crate::http) async fn one(
    State(front): State<Arc<Front>>,
    Extension(actor): Extension<Actor>,
    Path(name): Path<String>,
) -> Result<Response, Refused> {
    let found = known(&front, actor).await?.into_iter().find(|model| model["id"] == name.as_str());
    match found {
        Some(model) => Ok(answer_json(&model)),
        None => {
            let message = format!("no model is called {name:?}");
            Err(Failure::new(StatusCode::NOT_FOUND, "model_not_found", message).about("model").into())
        }
    }
}

async fn known(front: &Front, actor: Actor) -> Result<Vec<Value>, Failure> {
    let models = front.connect(actor).await?.models().await?;
    Ok(models.iter().flat_map(shown).collect())
}

/// A model under each of its names. When it was made, which the API has, is not known.
fn shown(model: &ModelInfo) -> impl Iterator<Item = Value> {
    let names = std::iter::once(&model.name).chain(&model.aliases);
    names.map(|name| json!({ "id": name, "object": "model", "created": 0, "owned_by": "trellis" }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_known_by_all_of_its_names() {
        let model =
            ModelInfo { name: "tiny".to_owned(), aliases: vec!["small".to_owned()], ..ModelInfo::default() };
        let names: Vec<Value> = shown(&model).map(|one| one["id"].clone()).collect();
        assert_eq!(names, ["tiny", "small"]);
    }
}
