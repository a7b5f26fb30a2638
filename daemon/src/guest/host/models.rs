//! `models`

use std::sync::Arc;

use trellis_engine::ModelHandle;
use trellis_engine::model::{
    ChatError, DecodeStream, EncodeError, GenerationPrompt, Message, SpecialText, SpecialTokens as Specials,
    YieldPoint,
};
use wasmtime::component::Resource;

use super::convert::{check_tokens, count, invalid};
use super::types::{GuestDecoder, GuestModel, HostError};
use crate::guest::bindings::trellis::host::models::{
    ChatEnd, ChatMessage, Host, HostModel, HostTextDecoder, ModelInfo, SpecialTokens,
};
use crate::guest::bindings::trellis::host::types::{Argument, Error as ApiError, UnknownName};
use crate::guest::guest_models::NotOpened;
use crate::guest::rooms::Need;
use crate::guest::store::GuestState;
use crate::models::names;

/// A text or token list at most this long is dealt with at once, which takes well below a millisecond. A hop to
/// another thread costs a guest tens of microseconds.
const N_SHORT_MAX: usize = 4 << 10;

/// What the template puts around one message, counted as bytes of text.
const MESSAGE_FRAME_BYTES: usize = 32;

/// What a token takes of host memory in the list of all of them.
const VOCABULARY_ENTRY_BYTES: usize = size_of::<Vec<u8>>() + 16;

impl GuestState {
    /// Does work whose time grows with `length`, of bytes or tokens: here if that is short, otherwise on a thread beside
    /// those that guests share, where it holds up no other guest.
    async fn work<T: Send + 'static>(
        &mut self,
        length: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        if length <= N_SHORT_MAX { work() } else { self.beside.run(&self.owner, &self.cpu, work).await }
    }

    /// As [`Self::work`], for work that encodes so many bytes of text, in parts. It is given up with the guest.
    async fn encoding<T: Send + 'static>(
        &mut self,
        text_bytes: usize,
        work: impl FnOnce(&YieldPoint) -> T + Send + 'static,
    ) -> T {
        match text_bytes {
            0..=N_SHORT_MAX => work(&YieldPoint::NONE),
            _ => self.work_in_parts(Need::of_text(text_bytes), work).await,
        }
    }

    /// The tokens of a text.
    pub(super) async fn encode_text(
        &mut self,
        model: ModelHandle,
        text: String,
        special: SpecialTokens,
    ) -> Result<Vec<u32>, HostError> {
        let special = match special {
            SpecialTokens::Parse => Specials::Parse,
            SpecialTokens::AsText => Specials::AsText,
        };
        // It may wait for long.
        let n_bytes = text.len();
        let _paid = self.pay_for_call(n_bytes)?;
        let encode = move |yields: &YieldPoint| {
            let tokens = model.model().tokenizer.encode_in_parts(&text, special, yields);
            tokens.map_err(|error| (error, text))
        };
        self.encoding(n_bytes, encode).await.map_err(|(error, text)| match error {
            EncodeError::GivenUp(_) => self.out_of_time(),
            error => invalid("text", &text, format!("a text that can be encoded: {error}")),
        })
    }
}

impl Host for GuestState {
    fn names(&mut self) -> wasmtime::Result<Vec<String>> {
        Ok(names(&self.models.now()))
    }
}

impl HostModel for GuestState {
    async fn open(&mut self, name: Option<String>) -> Result<Resource<GuestModel>, HostError> {
        let models = self.models.clone();
        let model = models.open(name.as_deref()).await.map_err(|not_opened| {
            let name = name.or(models.default_name()).unwrap_or_default();
            let unknown = UnknownName { name, known: models.known() };
            match not_opened {
                // It named none, and none stands for that.
                NotOpened::Unknown if unknown.name.is_empty() && !unknown.known.is_empty() => {
                    let expected = format!("a name, as none is the default: {}", unknown.known.join(", "));
                    ApiError::InvalidArgument(Argument {
                        name: "model".to_owned(),
                        value: String::new(),
                        expected,
                    })
                }
                NotOpened::Unknown => ApiError::UnknownModel(unknown),
                NotOpened::Leaving => ApiError::ModelLeaving(unknown),
                NotOpened::NotLoaded(reason) => ApiError::EngineFailed(reason),
            }
        })?;
        self.give(GuestModel { model })
    }

    fn info(&mut self, model: Resource<GuestModel>) -> wasmtime::Result<ModelInfo> {
        let loaded = &self.table.get(&model)?.model;
        let (model, limits) = (loaded.model(), loaded.limits());
        Ok(ModelInfo {
            name: model.name.clone(),
            architecture: model.config.architecture.name().to_owned(),
            vocab_size: count(limits.vocab_size),
            n_positions: count(limits.n_positions_max),
            hidden_size: count(limits.hidden_size),
            n_layers: count(model.config.n_layers),
            bos_token: model.bos_token,
            stop_tokens: model.stop_tokens.clone(),
            special_tokens: model.tokenizer.special_tokens().collect(),
            tokenizer: model.tokenizer.fingerprint().to_owned(),
            device: loaded.device().to_owned(),
            dtype: loaded.weights().dtype.name().to_owned(),
        })
    }

    async fn encode(
        &mut self,
        model: Resource<GuestModel>,
        text: String,
        special: SpecialTokens,
    ) -> Result<Vec<u32>, HostError> {
        let model = ModelHandle::clone(&self.table.get(&model)?.model);
        let tokens = self.encode_text(model, text, special).await?;
        self.pay_for_answer(size_of_val(&*tokens))?;
        Ok(tokens)
    }

    async fn decode(&mut self, model: Resource<GuestModel>, tokens: Vec<u32>) -> Result<String, HostError> {
        let model = self.table.get(&model)?.model.clone();
        check_tokens(&model, &tokens)?;
        let n_tokens = tokens.len();
        let of_tokens = self.pay_for_call(size_of_val(&*tokens))?;
        let counted = model.clone();
        let count = move || (counted.model().tokenizer.n_bytes_shown(&tokens, SpecialText::Skip), tokens);
        let (n_bytes, tokens) = self.work(n_tokens, count).await;
        // It is held twice as it is made, and what is no text becomes three bytes for each.
        let of_text = self.pay_for_call(4 * n_bytes)?;
        let decode = move || model.model().tokenizer.decode(&tokens, SpecialText::Skip);
        let text = self.work(n_tokens, decode).await;
        drop((of_tokens, of_text));
        self.pay_for_answer(text.len())?;
        Ok(text)
    }

    fn token_bytes(&mut self, model: Resource<GuestModel>, token: u32) -> Result<Vec<u8>, HostError> {
        let model = &self.table.get(&model)?.model;
        check_tokens(model, &[token])?;
        // Embeddings past the tokenizer's vocabulary stand for no text.
        Ok(model.model().tokenizer.token_bytes(token).unwrap_or_default().to_vec())
    }

    async fn vocabulary(&mut self, model: Resource<GuestModel>) -> Result<Vec<Vec<u8>>, HostError> {
        let model = self.table.get(&model)?.model.clone();
        let vocab_size = model.limits().vocab_size;
        self.pay_for_answer(vocab_size * VOCABULARY_ENTRY_BYTES)?;
        let list = move || {
            let tokenizer = &model.model().tokenizer;
            let bytes = |token| match tokenizer.token_bytes(token) {
                Some(bytes) if !tokenizer.is_special(token) => bytes.to_vec(),
                _ => Vec::new(),
            };
            (0..vocab_size as u32).map(bytes).collect()
        };
        Ok(self.work(vocab_size, list).await)
    }

    async fn encode_chat(
        &mut self,
        model: Resource<GuestModel>,
        messages: Vec<ChatMessage>,
        end: ChatEnd,
    ) -> Result<Vec<u32>, HostError> {
        let date = self.date;
        let model = Arc::clone(self.table.get(&model)?.model.model());
        if model.chat.is_none() {
            return Err(ApiError::NoChatTemplate(model.name.clone()).into());
        }
        let messages = messages.into_iter().map(|ChatMessage { role, content }| {
            let unknown = |_| invalid("role", &role, "system, user, assistant or tool");
            Ok(Message { role: role.parse().map_err(unknown)?, content })
        });
        let messages: Vec<_> = messages.collect::<Result<_, HostError>>()?;
        let prompt = match end {
            ChatEnd::Assistant => GenerationPrompt::Add,
            ChatEnd::Message => GenerationPrompt::Omit,
        };
        let length = messages.iter().map(|message| message.content.len() + MESSAGE_FRAME_BYTES).sum();
        let _paid = self.pay_for_call(length)?;
        let encode = move |yields: &YieldPoint| {
            let template = model.chat.as_ref().expect("checked above");
            template.encode_in_parts(&model.tokenizer, &messages, prompt, date, yields)
        };
        let tokens = self.encoding(length, encode).await.map_err(|error| match error {
            ChatError::GivenUp(_) | ChatError::Encode(EncodeError::GivenUp(_)) => self.out_of_time(),
            error => ApiError::ChatTemplate(error.to_string()).into(),
        })?;
        self.pay_for_answer(size_of_val(&*tokens))?;
        Ok(tokens)
    }

    fn drop(&mut self, model: Resource<GuestModel>) -> wasmtime::Result<()> {
        self.table.delete(model)?;
        Ok(())
    }
}

impl HostTextDecoder for GuestState {
    fn new(&mut self, model: Resource<GuestModel>) -> wasmtime::Result<Resource<GuestDecoder>> {
        let model = self.table.get(&model)?.model.clone();
        self.give_or_trap(GuestDecoder { model, stream: DecodeStream::new(SpecialText::Skip) })
    }

    fn push(&mut self, decoder: Resource<GuestDecoder>, token: u32) -> Result<String, HostError> {
        let GuestDecoder { model, stream } = self.table.get_mut(&decoder)?;
        check_tokens(model, &[token])?;
        Ok(stream.push(&model.model().tokenizer, token))
    }

    fn finish(&mut self, decoder: Resource<GuestDecoder>) -> wasmtime::Result<String> {
        let decoder = self.table.get_mut(&decoder)?;
        let stream = std::mem::replace(&mut decoder.stream, DecodeStream::new(SpecialText::Skip));
        Ok(stream.finish())
    }

    fn drop(&mut self, decoder: Resource<GuestDecoder>) -> wasmtime::Result<()> {
        self.table.delete(decoder)?;
        Ok(())
    }
}
