//! The gRPC service: runs one conversation for each stream.
//!
//! A stream needs no task and no queue. Its answers are polled by the connection: a peer that reads nothing
//! is not read from either.

use std::{future::poll_fn, pin::Pin, sync::Arc, task::Poll};

use envoy_types::pb::envoy::service::ext_proc::v3::{
    ProcessingRequest, ProcessingResponse,
    external_processor_server::{ExternalProcessor, ExternalProcessorServer, SERVICE_NAME},
};
use futures_util::{FutureExt as _, Stream, stream};
use tokio::time::timeout_at;
use tonic::{Code, Request, Response, Status, Streaming};

use crate::{Picker, conversation::Conversation, message_bytes::Counted, silent::SilentStreams};

/// Name of the service.
pub const EXT_PROC_SERVICE: &str = SERVICE_NAME;

/// Bytes of a message besides the body that it carries.
pub const MAX_OVERHEAD: usize = 256 * 1024;

/// Messages that are read when a stream has been reset.
const MAX_UNREAD: usize = 64;

/// Returns the service. A message may carry `max_body` bytes of a body, and `max_silent` streams may be open
/// without the headers of a request.
pub fn ext_proc_service<P: Picker>(
    picker: P,
    max_body: usize,
    max_silent: usize,
) -> Counted<ExternalProcessorServer<impl ExternalProcessor>, P> {
    let picker = Arc::new(picker);
    let service = Service { picker: picker.clone(), silent: SilentStreams::new(max_silent) };
    let service = ExternalProcessorServer::new(service)
        .max_decoding_message_size(max_body.saturating_add(MAX_OVERHEAD));
    Counted::new(service, picker, max_body)
}

struct Service<P> {
    picker: Arc<P>,
    silent: SilentStreams,
}

type Answers = Pin<Box<dyn Stream<Item = Result<ProcessingResponse, Status>> + Send>>;

#[tonic::async_trait]
impl<P: Picker> ExternalProcessor for Service<P> {
    type ProcessStream = Answers;

    async fn process(
        &self,
        request: Request<Streaming<ProcessingRequest>>,
    ) -> Result<Response<Answers>, Status> {
        let (_, connection, messages) = request.into_parts();
        let silent = self.silent.open()?;
        let conversation = Conversation::new(self.picker.clone(), connection, Some(silent));
        Ok(Response::new(Box::pin(stream::unfold(
            Some(Talk { messages, conversation }),
            |talk| async move {
                let mut talk = talk?;
                let answer = next(&mut talk.messages, &mut talk.conversation).await?;
                let rest = answer.is_ok().then_some(talk);
                Some((answer, rest))
            },
        ))))
    }
}

/// A stream.
struct Talk<P: Picker> {
    messages: Streaming<ProcessingRequest>,
    conversation: Conversation<P>,
}

impl<P: Picker> Drop for Talk<P> {
    /// A proxy resets the stream when the engine breaks. What it said of the answer before may be unread.
    fn drop(&mut self) {
        for _ in 0..MAX_UNREAD {
            let unread = self.conversation.watches().then(|| self.messages.message().now_or_never());
            let Some(Some(Ok(Some(message)))) = unread else { return };
            let _ = self.conversation.on(message).now_or_never();
            while self.conversation.next_answer().is_some() {}
        }
    }
}

/// Returns the next answer; `None`: the stream ends.
async fn next<P: Picker>(
    messages: &mut Streaming<ProcessingRequest>,
    conversation: &mut Conversation<P>,
) -> Option<Result<ProcessingResponse, Status>> {
    loop {
        if let Some(answer) = conversation.next_answer() {
            return Some(Ok(answer));
        }
        if conversation.is_over() {
            return None;
        }
        let deadline = conversation.deadline();
        let must_end = poll_fn(|_| if conversation.must_end() { Poll::Ready(()) } else { Poll::Pending });
        let message = tokio::select! {
            biased;
            message = timeout_at(deadline, messages.message()) => message.ok(),
            () = must_end => None,
        };
        let taken = match message {
            None => conversation.time_passed(),
            Some(Ok(Some(message))) => conversation.on(message).await,
            Some(Ok(None)) => return None,
            // Only `message_bytes` gives this code.
            Some(Err(status)) if status.code() == Code::ResourceExhausted => {
                conversation.without_room(status)
            }
            Some(Err(status)) => Err(status),
        };
        if let Err(status) = taken {
            return Some(Err(status));
        }
    }
}
