//! Every limit that the configuration sets, in one table.
//!
//! - Comes in: a [`Config`](crate::config::Config), which knows what its file has set.
//! - Goes out: a [`Limit`] for each number of `[limits]`, `[budgets.…]`, `[sessions]` and `[policy]`, and for the sizes at the top of the
//!   file: what it bounds, whose it is, how much, and who says so. `trellis limits`, the host API and the guide show these.
//! - What a limit bounds is said once, in the doc comment of its field; its unit follows from its name; whose it is stands in
//!   `scope`. What is in use of it is known to the service.
//! - Must not happen: a field of these structs that the table does not have: a test compares the table with a configuration
//!   that was written down.

mod scope;
mod source;
mod table;
mod unit;

pub use scope::Scope;
pub use source::{SetByFile, Source};
pub use table::{Limit, UNLIMITED, set_sizes, table};
pub(crate) use table::{of_guest, set_class, set_memory};
pub use unit::Unit;
