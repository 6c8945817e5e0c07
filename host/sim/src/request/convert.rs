//! Fields of a body from headers and from other APIs, as the engines take them.

use axum::http::HeaderMap;

use super::{
    Body, Input, OneOrMany,
    message::{Content, Message},
};
use crate::{api::Api, config::SimConfig, failure::Failure};

impl Body {
    /// Takes the rank from SGLang's header, which has priority over the body's.
    pub(super) fn take_rank(&mut self, headers: &HeaderMap) -> Result<(), Failure> {
        let Some(given) = headers.get("x-data-parallel-rank") else { return Ok(()) };
        let rank = given.to_str().ok().and_then(|text| text.trim().parse().ok());
        self.routed_dp_rank = Some(rank.ok_or_else(|| {
            Failure::bad(format!("Invalid X-Data-Parallel-Rank header: must be an integer, got {given:?}"))
        })?);
        Ok(())
    }

    /// Takes the id from where SGLang's handler of this API reads it.
    pub(super) fn take_id(&mut self, api: Api, headers: &HeaderMap) {
        let given = headers.get("x-override-rid").and_then(|value| value.to_str().ok()).map(str::to_owned);
        match api {
            Api::Messages => self.rid = given.map(OneOrMany::One),
            Api::Responses => self.rid = self.request_id.take().map(OneOrMany::One),
            Api::Chat | Api::Generate => self.rid = given.map(OneOrMany::One).or(self.rid.take()),
            Api::Completions => {}
        }
    }

    /// Turns the fields of another API into those of a chat, as the engines do. Fields that an engine does
    /// not use are dropped.
    pub(super) fn convert(&mut self, config: &SimConfig, api: Api) {
        let first = match api {
            Api::Chat | Api::Completions => return,
            Api::Generate => return self.convert_native(),
            Api::Messages => self.system.take(),
            Api::Responses => {
                self.messages = self.input.take().map(|input| match input {
                    Input::Text(text) => {
                        vec![Message { role: String::new(), content: Some(Content::Text(text)) }]
                    }
                    Input::Items(items) => items,
                });
                self.max_tokens = self.max_output_tokens;
                self.instructions.take().map(Content::Text)
            }
        };
        if let (Some(first), Some(messages)) = (first, &mut self.messages) {
            messages.insert(0, Message { role: String::new(), content: Some(first) });
        }
        if !api.takes_handoff(config) {
            (self.kv_transfer_params, self.bootstrap_room) = (None, None);
        }
        (self.min_tokens, self.n) = (0, None);
    }
}
