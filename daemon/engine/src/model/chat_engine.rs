//! The Jinja environment that transformers gives to chat templates (`utils/chat_template_utils.py`).

use std::sync::Arc;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Enumerator, Kwargs, Object, ObjectRepr, StringInput, Value};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, UndefinedBehavior};

use super::yield_point::YieldPoint;

/// Instructions of one rendering. A template spends a few tens on each message.
const FUEL: u64 = 5_000_000;
const N_RECURSIONS_MAX: usize = 64;
/// Spaces before a line. However many a template asks for are made in memory before anything is written.
const INDENT_MAX: usize = 1024;
const NAME: &str = "chat_template";

/// Compiles a template.
pub(crate) fn compile(source: String) -> Result<Environment<'static>, Error> {
    let mut env = Environment::new();
    env.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_undefined_behavior(UndefinedBehavior::Lenient);
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.set_fuel(Some(FUEL));
    env.set_recursion_limit(N_RECURSIONS_MAX);
    env.add_filter("tojson", tojson);
    env.add_filter("indent", indent);
    env.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    env.add_template_owned(NAME, source)?;
    Ok(env)
}

/// The messages of a chat as templates see them: a list in whose every message a rendering comes to its yield point.
#[derive(Debug)]
pub(crate) struct Messages {
    pub(crate) messages: Vec<Value>,
    pub(crate) yields: YieldPoint,
}

impl Object for Messages {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let message = self.messages.get(key.as_usize()?)?;
        Some(match self.yields.reach() {
            Ok(()) => message.clone(),
            // Whatever the template does with it fails.
            Err(given_up) => Error::new(ErrorKind::InvalidOperation, given_up.to_string()).into(),
        })
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.messages.len())
    }
}

/// Renders the template into at most `n_bytes_max` bytes, with a yield point at each piece of it.
pub(crate) fn render(
    env: &Environment,
    context: Value,
    n_bytes_max: usize,
    yields: &YieldPoint,
) -> Result<String, Error> {
    let mut out = Bounded { bytes: Vec::new(), n_bytes_max, yields };
    env.get_template(NAME)?.render_captured_to(context, &mut out)?;
    Ok(String::from_utf8(out.bytes).expect("a template writes whole strings"))
}

/// Refuses to grow past a size, and once nobody wants it.
struct Bounded<'a> {
    bytes: Vec<u8>,
    n_bytes_max: usize,
    yields: &'a YieldPoint,
}

impl std::io::Write for Bounded<'_> {
    fn write(&mut self, new: &[u8]) -> std::io::Result<usize> {
        self.yields.reach().map_err(std::io::Error::other)?;
        if new.len() > self.n_bytes_max - self.bytes.len() {
            let reason = format!("the rendered chat is longer than {} bytes", self.n_bytes_max);
            return Err(std::io::Error::other(reason));
        }
        self.bytes.extend_from_slice(new);
        Ok(new.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Refuses to indent without measure.
fn check_indent(width: Option<&Value>) -> Result<(), Error> {
    match width.and_then(|width| usize::try_from(width.clone()).ok()) {
        Some(width) if width > INDENT_MAX => {
            let reason = format!("an indent of {width} is more than {INDENT_MAX}");
            Err(Error::new(ErrorKind::InvalidOperation, reason))
        }
        _ => Ok(()),
    }
}

/// The filter of minijinja, for widths that there may be.
fn indent(
    text: StringInput<'_>,
    width: Option<usize>,
    first: Option<bool>,
    blank: Option<bool>,
    options: Kwargs,
) -> Result<Value, Error> {
    let named: Option<Value> = options.get("width")?;
    check_indent(width.map(Value::from).or(named).as_ref())?;
    minijinja::filters::indent(text, width, first, blank, options)
}

/// `json.dumps` as transformers calls it: not made safe for HTML, unlike the filter of minijinja.
fn tojson(value: &Value, indent: Option<Value>, options: Kwargs) -> Result<String, Error> {
    let ensure_ascii: Option<bool> = options.get("ensure_ascii")?;
    if ensure_ascii == Some(true) {
        return Err(Error::new(ErrorKind::InvalidOperation, "tojson: ensure_ascii=true is not supported"));
    }
    let named: Option<Value> = options.get("indent")?;
    check_indent(indent.as_ref().or(named.as_ref()))?;
    let escaped = minijinja::filters::tojson(value, indent, options)?;
    let escaped = escaped.as_str().unwrap_or_default();

    let mut json = String::with_capacity(escaped.len());
    let mut rest = escaped;
    while let Some(idx) = rest.find('\\') {
        json.push_str(&rest[..idx]);
        let escape = &rest[idx..];
        let (text, n_bytes) = match escape.get(..6) {
            Some("\\u003c") => ("<", 6),
            Some("\\u003e") => (">", 6),
            Some("\\u0026") => ("&", 6),
            Some("\\u0027") => ("'", 6),
            _ => (&escape[..2], 2), // JSON never ends in a backslash, and what follows one is ASCII
        };
        json.push_str(text);
        rest = &escape[n_bytes..];
    }
    json.push_str(rest);
    Ok(json)
}
