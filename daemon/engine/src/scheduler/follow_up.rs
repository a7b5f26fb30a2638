//! What comes after a row, as far as it is known before the row is computed.
//!
//! A backend that is told begins with the next token before the engine has seen this one; for that it needs the
//! page which that token goes to.

use std::sync::Arc;

use super::work::{RunWork, Work};
use super::{ContextState, Plan, Scheduler};
use crate::account::{Account, Resource};
use crate::backend::PAGE_LEN;
use crate::batch::FollowUp;
use crate::command::Ahead;

impl ContextState {
    /// What follows a row that ends at `end`.
    pub(super) fn follow_up(&self, end: usize, n_positions_max: usize) -> FollowUp {
        let n_tokens = self.kv.tokens.len();
        match &self.work {
            Some(Work::Run(run)) if end == n_tokens && n_tokens + 1 < n_positions_max => {
                run.follow_up(self.window.n())
            }
            _ => FollowUp::Unknown,
        }
    }
}

impl RunWork {
    /// What follows the draw of one more token, if that is no stop token.
    fn follow_up(&self, n_ahead: usize) -> FollowUp {
        let is_last = self.settings.n_tokens_max == Some(self.n_given + 1);
        let will_want_more = match self.settings.ahead {
            Ahead::Adaptive => self.queue.will_want_more(n_ahead),
            Ahead::Unbounded => true,
        };
        if will_want_more && !is_last { FollowUp::Expected } else { FollowUp::Unknown }
    }
}

impl Scheduler {
    /// Gives rows that end with their page the page of the token that follows. For steps in which nobody waits for
    /// pages: this takes what is free or cached and nothing from any context.
    pub(super) fn take_pages_ahead(&mut self, plan: &mut Plan) {
        for row in plan.rows.iter_mut().filter(|row| row.follow_up == FollowUp::Expected) {
            let context = self.contexts.get_mut(&row.id).expect("a planned context is in the table");
            if context.kv.blocks.len() * PAGE_LEN != row.end {
                continue;
            }
            let account = &context.owner.account;
            if account.charge(Resource::Pages, 1).is_err() {
                // It is told so when the token is computed, if it ever is.
                continue;
            }
            if self.pages.n_free() == 0 && !self.pages.reclaim_one() {
                account.release(Resource::Pages, 1);
                return;
            }
            let block = self.pages.allocate(account).expect("a page is free");
            context.kv.blocks.push(block);
            row.n_pages += 1;
        }
    }

    /// Takes back what contexts of an account were given ahead: its budget is for what they asked for.
    pub(super) fn forget_pages_ahead(&mut self, account: &Arc<Account>) {
        for context in self.contexts.values_mut().filter(|other| Arc::ptr_eq(&other.owner.account, account)) {
            context.kv.forget_unwritten(self.step, &mut self.pages);
        }
    }
}
