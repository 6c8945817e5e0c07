//! Stand-in for the endpoint picker in a binary without it. The configuration refuses its listener.

use std::{convert::Infallible, net::SocketAddr};

use axum::Router;
use tokio_util::sync::CancellationToken;

use crate::{
    config::{ExtProc, Problem},
    http::DataThread,
    state::SharedState,
};

/// A socket that does not exist.
#[derive(Debug)]
pub(super) struct PickerSocket(Infallible);

/// A listener that does not exist.
#[derive(Debug)]
pub(super) struct PickerListener(Infallible);

pub(super) fn socket(_settings: &ExtProc) -> Result<Option<PickerSocket>, Problem> {
    Ok(None)
}

impl PickerSocket {
    pub(super) fn listen(self) -> Result<PickerListener, Problem> {
        match self.0 {}
    }
}

impl PickerListener {
    pub(super) fn try_clone(&self) -> std::io::Result<Self> {
        match self.0 {}
    }

    pub(super) fn address(&self) -> std::io::Result<SocketAddr> {
        match self.0 {}
    }
}

pub(super) async fn serve(
    _listener: Option<PickerListener>,
    _thread: DataThread,
    _own: Router,
    _shared: SharedState,
    _stop: CancellationToken,
) {
}
