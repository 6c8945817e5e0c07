//! A request with a body, as handlers read it.

use std::{mem, sync::Arc};

use axum::{
    body::{Body as HttpBody, Bytes},
    extract::{FromRequest, Request},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::de::DeserializeOwned;

use super::{answer, refuse, refuse_as};
use crate::{
    engine::{Engine, InFlight, Outcome, Recorded},
    failure::Failure,
    faults::{Break, FaultKind, Picked},
    leg::Leg,
    server::Conn,
    wire::Shape,
};

/// A request, its connection and the engine that got it.
pub(super) struct Call {
    pub(super) engine: Arc<Engine>,
    pub(super) conn: Conn,
    pub(super) path: String,
    pub(super) headers: HeaderMap,
    pub(super) bytes: Bytes,
}

/// An answer in place of the one that was asked for.
pub(super) struct Refused(Box<Response>);

impl FromRequest<Arc<Engine>> for Call {
    type Rejection = Response;

    async fn from_request(mut request: Request, engine: &Arc<Engine>) -> Result<Self, Response> {
        let conn = request.extensions().get::<Conn>().cloned();
        let conn = conn.ok_or_else(|| StatusCode::INTERNAL_SERVER_ERROR.into_response())?;
        let (path, headers) = (request.uri().path().to_owned(), mem::take(request.headers_mut()));
        let bytes = Bytes::from_request(request, engine).await.map_err(IntoResponse::into_response)?;
        Ok(Self { engine: engine.clone(), conn, path, headers, bytes })
    }
}

impl Call {
    /// Records the request and carries out the faults that leave no answer.
    pub(super) async fn faulted(&self) -> Result<(), Refused> {
        let Self { engine, conn, path, headers, bytes } = self;
        engine.record(|| record(path, Some(Leg::Aggregated), headers, bytes));
        let faults = engine.faults.pick(Leg::Aggregated.into(), bytes);
        let mut flight = InFlight::new(engine, Leg::Aggregated);
        let shape = engine.config.dialect.shape();
        let response = act_out(engine, shape, &faults, conn, false, &mut flight).await;
        let cut = matches!(faults.body_break(), Some((Break::Cut, _)));
        flight.end(if cut { Outcome::Fault } else { Outcome::Ok });
        let response =
            response.or_else(|| cut.then(|| answer::cut_body(r#"{"object":"list","data":[{"index":0}]}"#)));
        response.map_or(Ok(()), |response| Err(response.into()))
    }

    /// Like [`Self::faulted`], and reads the body. `model` returns the model that it names.
    pub(super) async fn read<T: DeserializeOwned>(
        &self,
        model: impl Fn(&T) -> Option<&String>,
    ) -> Result<T, Refused> {
        self.faulted().await?;
        let asked = serde_json::from_slice(&self.bytes);
        let asked: T = asked
            .map_err(|error| self.refused(&Failure::shape(format!("1 validation error:\n  {error}"))))?;
        match model(&asked).filter(|model| **model != self.engine.config.model) {
            Some(model) => {
                Err(self.refused(&Failure::not_found(format!("The model `{model}` does not exist."))))
            }
            None => Ok(asked),
        }
    }

    /// Returns a failure as this engine writes it.
    pub(super) fn refused(&self, failure: &Failure) -> Refused {
        refuse(&self.engine, failure).into()
    }
}

impl From<Response> for Refused {
    fn from(response: Response) -> Self {
        Self(Box::new(response))
    }
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        *self.0
    }
}

/// Carries out the faults that need nothing from the engine.
pub(super) async fn act_out(
    engine: &Engine,
    shape: &dyn Shape,
    faults: &Picked,
    conn: &Conn,
    stream: bool,
    flight: &mut InFlight,
) -> Option<Response> {
    if faults.has(&FaultKind::Die) {
        engine.die();
    }
    if faults.has(&FaultKind::Refuse) || faults.has(&FaultKind::Die) {
        flight.end(Outcome::Fault);
        conn.reset();
        std::future::pending::<()>().await;
    }
    if faults.has(&FaultKind::HangBeforeHeaders) {
        std::future::pending::<()>().await;
    }
    if let Some((status, retry_after)) = faults.status() {
        flight.end(Outcome::Fault);
        return Some(refuse_as(shape, &Failure::injected(status, retry_after)));
    }
    if faults.has(&FaultKind::WrongContentType) {
        flight.end(Outcome::Fault);
        let page = "<html><body><h1>It works!</h1></body></html>";
        return Some(([(header::CONTENT_TYPE, "text/html; charset=utf-8")], page).into_response());
    }
    if faults.has(&FaultKind::HangAfterHeaders) {
        let flight = std::mem::replace(flight, InFlight::over(flight));
        let never = futures_util::stream::once(async move {
            let _held = flight;
            std::future::pending::<Result<Bytes, std::io::Error>>().await
        });
        let content_type = if stream { answer::EVENT_STREAM } else { "application/json" };
        return Some(([(header::CONTENT_TYPE, content_type)], HttpBody::from_stream(never)).into_response());
    }
    None
}

pub(super) fn record(path: &str, leg: Option<Leg>, headers: &HeaderMap, bytes: &Bytes) -> Recorded {
    let headers = headers.iter();
    Recorded {
        path: path.to_owned(),
        leg,
        headers: headers
            .map(|(name, value)| (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned()))
            .collect(),
        body: String::from_utf8_lossy(bytes).into_owned(),
    }
}
