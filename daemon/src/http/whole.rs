//! An answer that is waited for as a whole.

use super::exchange::{Reason, Reply, Token, Usage};
use super::failure::Failure;
use super::run::Run;
use super::share::{Share, bytes_of_json};

/// What a byte of a text takes: in lists that grow, as it is and as JSON, where it may be six.
const TEXT_COPIES: u64 = 16;

/// What a token with its log-probability takes, or another in its place, beside the bytes of its text: as it is and as JSON.
const TOKEN_BYTES: u64 = 256;

/// What a number of a vector takes, as it is and as JSON.
const NUMBER_BYTES: u64 = 48;

/// What a reply comes to at most in an answer that is written as text.
pub(super) fn n_bytes(reply: &Reply) -> u64 {
    let text = |text: &str| TEXT_COPIES * text.len() as u64;
    let one = |bytes: &[u8]| TOKEN_BYTES + 2 * TEXT_COPIES * bytes.len() as u64;
    let token =
        |token: &Token| one(&token.bytes) + token.top.iter().map(|other| one(&other.bytes)).sum::<u64>();
    match reply {
        Reply::Begun { model, .. } => text(model),
        Reply::Thought { text: thought, .. } => text(thought),
        Reply::Piece { text: piece, tokens, .. } => text(piece) + tokens.iter().map(token).sum::<u64>(),
        Reply::Call { name, arguments, .. } => {
            TOKEN_BYTES + text(name) + text(arguments) + bytes_of_json(arguments.as_bytes())
        }
        Reply::Finished { stop, .. } => text(stop.as_deref().unwrap_or_default()),
        Reply::Embedding { vector, .. } => NUMBER_BYTES * vector.len() as u64,
        Reply::Ended(_) | Reply::Refused(_) => 0,
    }
}

/// All that a guest has replied.
#[derive(Debug, Default)]
pub(super) struct Whole {
    pub(super) model: String,
    pub(super) choices: Vec<Choice>,
    /// The vectors of the inputs.
    pub(super) vectors: Vec<Vec<f32>>,
    pub(super) usage: Usage,
}

#[derive(Debug, Default)]
pub(super) struct Choice {
    pub(super) thought: Option<String>,
    pub(super) text: String,
    pub(super) tokens: Vec<Token>,
    /// Names and arguments.
    pub(super) calls: Vec<(String, String)>,
    pub(super) reason: Option<Reason>,
    pub(super) stop: Option<String>,
}

impl Whole {
    /// Waits for the end of an answer that takes so many times what it does as text, all of it on the account of the request.
    ///
    /// # Errors
    /// The account has not so much left; those of the guest.
    pub(super) async fn of(mut run: Run, n_times: u64) -> Result<(Self, Share), Failure> {
        let mut whole = Self { model: run.begun().await?.0, ..Self::default() };
        while let Some(reply) = run.next().await {
            let reply = reply?;
            run.share.add(n_times.saturating_mul(n_bytes(&reply)))?;
            whole.take(reply);
        }
        Ok((whole, run.share))
    }

    fn take(&mut self, reply: Reply) {
        match reply {
            Reply::Thought { choice, text } => {
                self.choice(choice).thought.get_or_insert_default().push_str(&text);
            }
            Reply::Piece { choice, text, tokens } => {
                let choice = self.choice(choice);
                choice.text.push_str(&text);
                choice.tokens.extend(tokens);
            }
            Reply::Call { choice, name, arguments } => self.choice(choice).calls.push((name, arguments)),
            Reply::Finished { choice, reason, stop } => {
                let choice = self.choice(choice);
                (choice.reason, choice.stop) = (Some(reason), stop);
            }
            Reply::Embedding { index, vector } => {
                if let Some(place) = at(&mut self.vectors, index) {
                    *place = vector;
                }
            }
            Reply::Ended(usage) => self.usage = usage,
            Reply::Begun { model, .. } => self.model = model,
            // A refusal is a failure by now.
            Reply::Refused(_) => {}
        }
    }

    fn choice(&mut self, idx: usize) -> &mut Choice {
        let idx = idx.min(N_MAX - 1);
        at(&mut self.choices, idx).expect("it is no more than there may be")
    }
}

/// More choices or inputs than any request has: a guest that counts wrongly takes no memory for it.
const N_MAX: usize = 4096;

fn at<T: Default>(list: &mut Vec<T>, idx: usize) -> Option<&mut T> {
    if idx >= list.len() && idx < N_MAX {
        list.resize_with(idx + 1, T::default);
    }
    list.get_mut(idx)
}

#[cfg(test)]
mod tests {
    use super::super::exchange::Other;
    use super::*;

    #[test]
    fn all_that_adds_up_is_counted() {
        let other = Other { bytes: vec![b'a'; 4], logprob: -1.0 };
        let token = Token { bytes: vec![b'a'; 4], logprob: -1.0, top: vec![other; 20] };
        let piece = Reply::Piece { choice: 0, text: String::new(), tokens: vec![token; 10] };
        assert_eq!(n_bytes(&piece), 10 * 21 * (TOKEN_BYTES + 8 * TEXT_COPIES));
        let (text, name) = ("a".repeat(100), "f".to_owned());
        assert!(n_bytes(&Reply::Thought { choice: 0, text: text.clone() }) >= 100);
        assert!(n_bytes(&Reply::Embedding { index: 0, vector: vec![0.1; 100] }) >= 100 * 4);
        assert!(n_bytes(&Reply::Finished { choice: 0, reason: Reason::Stop, stop: Some(text) }) >= 100);
        let calls = Reply::Call { choice: 0, name, arguments: format!("[{}0]", "0,".repeat(100)) };
        assert!(n_bytes(&calls) > 100 * 200, "it may be read as a tree");
    }
}
