//! The fields of a request's body, taken out one by one. What is left in the end is what this front does not know.

use axum::http::StatusCode;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::failure::Failure;

/// An object of a request, and where it stands in it.
#[derive(Debug)]
pub(super) struct Fields {
    place: String,
    map: Map<String, Value>,
}

impl Fields {
    /// # Errors
    /// The body is no object in JSON.
    pub(super) fn of_body(body: &[u8]) -> Result<Self, Failure> {
        let no_json = |message: String| Failure::new(StatusCode::BAD_REQUEST, "invalid_json", message);
        match serde_json::from_slice(body) {
            Ok(Value::Object(map)) => Ok(Self { place: String::new(), map }),
            Ok(_) => Err(no_json("the body is no object in JSON".to_owned())),
            Err(error) => Err(no_json(format!("the body is not JSON: {error}"))),
        }
    }

    /// An object at a place of a request.
    ///
    /// # Errors
    /// It is none.
    pub(super) fn of(value: Value, place: impl Into<String>) -> Result<Self, Failure> {
        let place = place.into();
        match value {
            Value::Object(map) => Ok(Self { place, map }),
            _ => Err(Failure::invalid(&place, format!("{place} is no object"))),
        }
    }

    /// The whole name of a field.
    pub(super) fn name_of(&self, name: &str) -> String {
        if self.place.is_empty() { name.to_owned() } else { format!("{}.{name}", self.place) }
    }

    /// A field that may be left out. One that is null is left out.
    ///
    /// # Errors
    /// It is something else.
    pub(super) fn take<T: DeserializeOwned>(&mut self, name: &str) -> Result<Option<T>, Failure> {
        let Some(value) = self.map.remove(name).filter(|value| !value.is_null()) else { return Ok(None) };
        let place = self.name_of(name);
        let wrong = |error| Failure::invalid(&place, format!("{place}: {error}"));
        serde_json::from_value(value).map(Some).map_err(wrong)
    }

    /// What a field says, which is left where it is.
    pub(super) fn look(&self, name: &str) -> Option<&Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// A field that has to be there.
    ///
    /// # Errors
    /// It is not, or is something else.
    pub(super) fn need<T: DeserializeOwned>(&mut self, name: &str) -> Result<T, Failure> {
        self.take(name)?.ok_or_else(|| {
            let place = self.name_of(name);
            let message = format!("{place} is missing");
            Failure::new(StatusCode::BAD_REQUEST, "missing_required_parameter", message).about(place)
        })
    }

    /// A number in a range.
    ///
    /// # Errors
    /// It is outside, or no number.
    pub(super) fn number(&mut self, name: &str, (least, most): (f32, f32)) -> Result<Option<f32>, Failure> {
        let number = self.take::<f32>(name)?;
        match number.filter(|number| !(least..=most).contains(number)) {
            Some(number) => {
                let place = self.name_of(name);
                let message = format!("{place} is {number}, expected {least} to {most}");
                Err(Failure::invalid(place, message))
            }
            None => Ok(number),
        }
    }

    /// A whole number in a range.
    ///
    /// # Errors
    /// It is outside, or no whole number.
    pub(super) fn count(&mut self, name: &str, (least, most): (u32, u32)) -> Result<Option<u32>, Failure> {
        let number = self.take::<i64>(name)?;
        let place = self.name_of(name);
        let in_range = |number: i64| {
            let fits = u32::try_from(number).ok().filter(|number| (least..=most).contains(number));
            fits.ok_or_else(|| {
                let message = format!("{place} is {number}, expected {least} to {most}");
                Failure::invalid(&place, message)
            })
        };
        number.map(in_range).transpose()
    }

    /// An object inside this one.
    ///
    /// # Errors
    /// It is no object.
    pub(super) fn object(&mut self, name: &str) -> Result<Option<Self>, Failure> {
        let place = self.name_of(name);
        self.take::<Value>(name)?.map(|value| Self::of(value, place)).transpose()
    }

    /// A JSON schema.
    ///
    /// # Errors
    /// It is no object.
    pub(super) fn schema(&mut self, name: &str) -> Result<Option<Value>, Failure> {
        let place = self.name_of(name);
        match self.take::<Value>(name)? {
            None => Ok(None),
            Some(schema @ Value::Object(_)) => Ok(Some(schema)),
            Some(_) => Err(Failure::invalid(&place, format!("{place} is no JSON schema: it is no object"))),
        }
    }

    /// Fields that change nothing of an answer.
    pub(super) fn pass_over(&mut self, names: &[&str]) {
        for name in names {
            self.map.remove(*name);
        }
    }

    /// A field that is done in one way only.
    ///
    /// # Errors
    /// It says another.
    pub(super) fn only(&mut self, name: &str, allowed: &[Value], why: &str) -> Result<(), Failure> {
        match self.map.remove(name) {
            Some(value) if !value.is_null() && !allowed.contains(&value) => {
                Err(Failure::unsupported(self.name_of(name), why))
            }
            _ => Ok(()),
        }
    }

    /// That nothing is left.
    ///
    /// # Errors
    /// A field is, which is named.
    pub(super) fn finish(self) -> Result<(), Failure> {
        match self.map.iter().find(|(_, value)| !value.is_null()) {
            Some((name, _)) => {
                let place = self.name_of(name);
                let message = format!("{place} is nothing that this daemon does");
                Err(Failure::new(StatusCode::BAD_REQUEST, "unsupported_parameter", message).about(place))
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(text: &str) -> Fields {
        Fields::of_body(text.as_bytes()).expect("an object")
    }

    #[test]
    fn what_is_left_is_named() {
        let mut all = fields(r#"{"n": 2, "user": "ada", "logprobs": null, "a": {"b": 1, "c": 2}}"#);
        assert_eq!(all.count("n", (1, 8)).expect("in range"), Some(2));
        all.pass_over(&["user"]);
        let mut inner = all.object("a").expect("an object").expect("it is there");
        assert_eq!(inner.take::<u32>("b").expect("a number"), Some(1));
        let left = inner.finish().expect_err("c is left");
        assert_eq!((left.status.as_u16(), left.param.as_deref()), (400, Some("a.c")));
        all.finish().expect("null is nothing");
    }

    #[test]
    fn what_is_wrong_is_named_with_its_range() {
        let mut all = fields(r#"{"n": 0, "temperature": 3, "top_p": "x", "tier": "flex", "schema": []}"#);
        let error = all.count("n", (1, 8)).expect_err("too small");
        assert_eq!((error.message.as_str(), error.param.as_deref()), ("n is 0, expected 1 to 8", Some("n")));
        let error = all.number("temperature", (0.0, 2.0)).expect_err("too large");
        assert_eq!(error.message, "temperature is 3, expected 0 to 2");
        assert_eq!(all.number("top_p", (0.0, 1.0)).expect_err("a text").param.as_deref(), Some("top_p"));
        assert!(all.only("tier", &[json!("auto")], "there are no tiers").is_err());
        assert_eq!(all.need::<String>("model").expect_err("missing").code, "missing_required_parameter");
        assert!(all.schema("schema").is_err());
        assert_eq!(Fields::of_body(b"[1]").expect_err("a list").code, "invalid_json");
    }

    #[test]
    fn a_schema_keeps_the_order_of_its_keys() {
        let schema = r#"{"type":"object","properties":{"z":{},"a":{}}}"#;
        let mut all = fields(&format!(r#"{{"schema": {schema}}}"#));
        assert_eq!(all.schema("schema").expect("a schema").expect("it is there").to_string(), schema);
    }
}
