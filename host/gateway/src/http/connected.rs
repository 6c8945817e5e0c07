//! Service that answers the requests of a connection.

use std::{convert::Infallible, sync::Arc};

use axum::{Router, body::Body as RouterBody};
use bytes::Bytes;
use futures_util::{FutureExt as _, TryFutureExt as _, future::Either};
use http_body_util::Either as EitherBody;
use hyper::{Method, Request, Response, body::Body, service::Service as _};
use hyper_util::service::TowerToHyperService;
use tokio::time::Instant;

use super::{DataThread, arrival::Arrival, completion, peer::Sender, pieces::Pieces, room::Room};
use crate::{
    openai::endpoint::Endpoint,
    orchestrate::{client::connection::ClientConnection, relay::Answer},
};

/// Service that answers the requests of a listener.
#[derive(Clone)]
pub(crate) struct Service {
    router: Router,
    /// Runs the requests for engines without the steps and boxes of the router; `None`: the router runs them,
    /// because a layer of it changes their answers.
    engines: Option<DataThread>,
}

/// Largest piece of an answer of the router, bytes.
const PIECE: usize = 16 * 1024;

/// The body of an answer: an engine's, or the router's.
pub(super) type AnswerBody = EitherBody<Answer, Pieces<RouterBody>>;

impl Service {
    /// Answers every request with the router.
    pub(crate) fn of_router(router: Router) -> Self {
        Self { router, engines: None }
    }

    /// Answers by the router, which adds nothing to the answers of engines.
    pub(super) fn of_clients(router: Router, thread: DataThread) -> Self {
        Self { router, engines: Some(thread) }
    }

    /// The router, for requests that come another way.
    pub(crate) fn router(&self) -> &Router {
        &self.router
    }
}

/// A connection as its requests know it.
pub(super) struct Connected {
    router: TowerToHyperService<Router>,
    engines: Option<DataThread>,
    sender: Sender,
    room: Arc<Room>,
}

impl Connected {
    pub(super) fn new(Service { router, engines }: Service, sender: Sender, room: Arc<Room>) -> Self {
        Self { router: TowerToHyperService::new(router), engines, sender, room }
    }

    /// Answers a request, whose first byte arrived at `first_byte`, to `client`.
    pub(super) fn answer<B>(
        &self,
        mut request: Request<B>,
        first_byte: Instant,
        client: ClientConnection,
    ) -> impl Future<Output = Result<Response<AnswerBody>, Infallible>> + use<B>
    where
        B: Body<Data = Bytes, Error = hyper::Error> + Send + Unpin + 'static,
    {
        self.room.has_request();
        let arrival = Arrival { sender: self.sender.clone(), first_byte, client: Some(client) };
        let engines = self.engines.as_ref().filter(|_| request.method() == Method::POST);
        let posted = engines.and_then(|thread| Some((thread, Endpoint::posted(request.uri().path())?)));
        if let Some((thread, endpoint)) = posted {
            let page = thread.check_page(request.headers(), request.uri());
            let answer = completion::serve(thread.context(), endpoint, arrival, request, page);
            return Either::Left(answer.map(|answer| Ok(answer.map(EitherBody::Left))));
        }
        request.extensions_mut().insert(arrival);
        let answer = self.router.call(request);
        Either::Right(answer.map_ok(|answer| answer.map(|body| EitherBody::Right(Pieces::of(body, PIECE)))))
    }
}
