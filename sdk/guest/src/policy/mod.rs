//! Policies of the operator: components that see, and may change, what flows between everybody's guests and their clients, and
//! that say what stands in front of all samplers.
//!
//! ```no_run
//! use trellis_guest::policy::{GuestInfo, Output, Policy, Settings, Verdict, log};
//!
//! /// Counts what guests send.
//! struct Audit {
//!     n_bytes: usize,
//! }
//!
//! impl Policy for Audit {
//!     fn begin(_: &Settings) -> Result<Self, String> {
//!         Ok(Self { n_bytes: 0 })
//!     }
//!
//!     fn emitted(&mut self, guest: &GuestInfo, output: Output) -> Verdict {
//!         if let Output::Text(text) = &output {
//!             self.n_bytes += text.len();
//!             log(&format!("guest {} of user {}: {} bytes", guest.number, guest.uid, self.n_bytes));
//!         }
//!         Verdict::Pass
//!     }
//! }
//!
//! trellis_guest::policy!(Audit);
//! # fn main() {}
//! ```
//!
//! Each guest has an instance of its own, so that a policy may hold text back until more comes, and [`Policy::ended`] gives the
//! rest. A policy that panics, or takes too long, ends the guest. `trellis serve` takes it by the section `[policy]` of its
//! configuration.

pub mod bindings;

use std::fmt::Display;
use std::str::FromStr;

#[doc(inline)]
pub use bindings::trellis::host::policies::{
    GuestInfo, Input, Outcome, Output, Ruling, Tokenizer, Used, Verdict, log,
};

use crate::Token;
use crate::programs::{Builder, Definition, Row, as_raw};

/// What a policy does. Each function has a default that changes nothing.
pub trait Policy: Sized + 'static {
    /// An instance of it, for a guest or for [`front`](Self::front).
    ///
    /// # Errors
    /// The settings are not what it needs; the daemon does not start then.
    fn begin(settings: &Settings) -> Result<Self, String>;

    /// What stands in front of everybody's samplers for the model of this name.
    ///
    /// # Errors
    /// The model is none that it knows how to bound; it is not loaded then.
    fn front(&mut self, _model: &str, _tokenizer: &Tokenizer) -> Result<Front, String> {
        Ok(Front::default())
    }

    /// Something that the guest sends to its client.
    fn emitted(&mut self, _guest: &GuestInfo, _output: Output) -> Verdict {
        Verdict::Pass
    }

    /// Something that the client sends to the guest: its arguments first.
    fn received(&mut self, _guest: &GuestInfo, _input: Input) -> Ruling {
        Ruling::Pass
    }

    /// The guest has ended; what is returned goes to its client.
    fn ended(&mut self, _guest: &GuestInfo, _used: Used, _outcome: Outcome) -> Vec<Output> {
        Vec::new()
    }
}

impl Verdict {
    /// The output does not go on.
    #[must_use]
    pub fn dropped() -> Self {
        Self::Replace(Vec::new())
    }

    /// This goes on in its place.
    #[must_use]
    pub fn instead(output: Output) -> Self {
        Self::Replace(vec![output])
    }
}

/// The section `[policy.settings]` of the daemon's configuration: texts by names.
#[derive(Clone, Debug, Default)]
pub struct Settings(Vec<(String, String)>);

impl Settings {
    /// These, for tests.
    #[must_use]
    pub fn of(settings: &[(&str, &str)]) -> Self {
        Self(settings.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned())).collect())
    }

    /// That there are none but those of these names: one that is misspelled, or stands in the wrong section, would do nothing.
    ///
    /// # Errors
    /// There is another, which the error names.
    pub fn only(&self, names: &[&str]) -> Result<(), String> {
        match self.0.iter().find(|(name, _)| !names.contains(&name.as_str())) {
            Some((name, _)) => Err(format!("there is no setting {name}; there are {}", names.join(", "))),
            None => Ok(()),
        }
    }

    /// The text of this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(known, _)| known == name).map(|(_, text)| text.as_str())
    }

    /// What the text of this name says, such as a number; `default` where there is none.
    ///
    /// # Errors
    /// It says something else.
    pub fn parsed<T: FromStr<Err: Display>>(&self, name: &str, default: T) -> Result<T, String> {
        let Some(text) = self.get(name) else { return Ok(default) };
        text.parse().map_err(|error| format!("the setting {name} is {text:?}: {error}"))
    }

    /// The parts of the text of this name between commas, without spaces around them.
    pub fn list(&self, name: &str) -> impl Iterator<Item = &str> {
        let parts = self.get(name).unwrap_or_default().split(',').map(str::trim);
        parts.filter(|part| !part.is_empty())
    }
}

/// What stands in front of everybody's samplers.
#[derive(Clone, Debug, Default)]
pub struct Front {
    forbidden: Vec<Token>,
    program: Option<Definition>,
}

impl Front {
    /// Nobody draws these tokens.
    #[must_use]
    pub fn forbid(mut self, tokens: impl IntoIterator<Item = Token>) -> Self {
        self.forbidden.extend(tokens);
        self
    }

    /// The row that the closure returns takes the place of the logits, for all that draws.
    #[must_use]
    pub fn row(mut self, write: impl for<'b> FnOnce(&'b Builder) -> Row<'b>) -> Self {
        self.program = Some(Definition::build_row(write));
        self
    }
}

impl Tokenizer {
    /// The tokens whose bytes are as wanted. Those that stand for no text have none.
    pub fn tokens_where(&self, mut is_wanted: impl FnMut(&[u8]) -> bool) -> Vec<Token> {
        let vocabulary = self.vocabulary();
        (0..).zip(&vocabulary).filter(|(_, bytes)| is_wanted(bytes)).map(|(token, _)| token).collect()
    }
}

/// What `policy!` exports.
#[doc(hidden)]
pub mod exported {
    use super::bindings::trellis::host::policies as raw;
    use super::{Policy, Settings, as_raw, log};

    pub fn begin<P: Policy>(settings: Vec<(String, String)>) -> Result<P, String> {
        std::panic::set_hook(Box::new(|info| log(&crate::panics::told(info))));
        P::begin(&Settings(settings))
    }

    pub fn front<P: Policy>(
        policy: &mut P,
        model: &str,
        tokenizer: &super::Tokenizer,
    ) -> Result<raw::Front, String> {
        let front = policy.front(model, tokenizer)?;
        Ok(raw::Front { forbidden: front.forbidden, program: front.program.as_ref().map(as_raw) })
    }
}

/// Makes a type the operator's policy: `trellis_guest::policy!(MyPolicy);`.
#[macro_export]
macro_rules! policy {
    ($policy:ty) => {
        #[cfg(not(test))]
        const _: () = {
            use $crate::policy::bindings::{self, exports::trellis::host::policing};
            use $crate::policy::{Policy, exported};
            ::std::thread_local! {
                static POLICY: ::std::cell::RefCell<::std::option::Option<$policy>> =
                    const { ::std::cell::RefCell::new(::std::option::Option::None) };
            }
            fn with<T>(act: impl ::std::ops::FnOnce(&mut $policy) -> T) -> T {
                POLICY.with_borrow_mut(|policy| act(policy.as_mut().expect("it has begun")))
            }
            struct Exported;
            impl policing::Guest for Exported {
                fn begin(
                    settings: ::std::vec::Vec<policing::Setting>,
                ) -> ::std::result::Result<(), ::std::string::String> {
                    let policy = exported::begin::<$policy>(settings)?;
                    POLICY.set(::std::option::Option::Some(policy));
                    ::std::result::Result::Ok(())
                }
                fn put_in_front(
                    model: ::std::string::String,
                    tokenizer: &$crate::policy::Tokenizer,
                ) -> ::std::result::Result<policing::Front, ::std::string::String> {
                    with(|policy| exported::front(policy, &model, tokenizer))
                }
                fn emitted(guest: policing::GuestInfo, output: policing::Output) -> policing::Verdict {
                    with(|policy| Policy::emitted(policy, &guest, output))
                }
                fn received(guest: policing::GuestInfo, input: policing::Input) -> policing::Ruling {
                    with(|policy| Policy::received(policy, &guest, input))
                }
                fn ended(
                    guest: policing::GuestInfo,
                    used: policing::Used,
                    outcome: policing::Outcome,
                ) -> ::std::vec::Vec<policing::Output> {
                    with(|policy| Policy::ended(policy, &guest, used, outcome))
                }
            }
    bindings::export_policy!(Exported with_types_in bindings);
        };
        // A crate's tests call the policy itself.
        #[cfg(test)]
        const _: fn(&$crate::policy::Settings) -> ::std::result::Result<$policy, ::std::string::String> =
            <$policy as $crate::policy::Policy>::begin;
    };
}
