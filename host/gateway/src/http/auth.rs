//! Authenticates the sender of a request: a client with its tenant, or an operator with a role.

use std::{net::IpAddr, sync::Arc};

use axum::http::HeaderMap;

use super::{
    credentials::{bearer, client_key},
    peer::Sender,
};
use crate::{
    openai::error::ApiError,
    state::{
        Settings, State,
        bad_keys::DELAY,
        caller::{Caller, Operator, Tenant},
        jwt::{TokenError, Verified, is_token},
        keys::{Found, Keys},
        network::network,
    },
};

/// Maximum length of the name of a tenant in the header of a proxy, bytes.
const MAX_TENANT: usize = 128;

/// Lets a client's request with a known key or certificate pass, and returns who sent it. A key counts before
/// a certificate. Wrong keys are counted, and slowed down when an address sends many.
///
/// # Errors
/// [`ApiError`] that says what is wrong with the key.
pub(crate) async fn authorize_client(
    state: &State,
    headers: &HeaderMap,
    sender: &Sender,
) -> Result<Caller, ApiError> {
    let settings = &state.settings;
    let mut caller = Caller::default();
    if settings.clients_are_known {
        caller = match client_key(headers)? {
            Some(given) => Box::pin(by_key(state, given, sender.address)).await?,
            None => by_certificate(settings, sender).cloned().ok_or(ApiError::Unauthorized)?,
        };
    }
    if caller.tenant.is_none() {
        caller.tenant = named_by_proxy(settings, headers, sender.address)?;
    }
    Ok(caller)
}

/// Returns who a key or token belongs to.
async fn by_key(state: &State, given: &str, peer: IpAddr) -> Result<Caller, ApiError> {
    let error = match token(state, given).await {
        Some(Ok(verified)) => return Ok(verified.caller.clone()),
        Some(Err(error @ TokenError::Wrong(_))) => refused(error),
        Some(Err(error)) => return Err(refused(error)),
        None => match owner(state, &state.settings.keys, given, peer).await? {
            Some(caller) => return Ok(caller.clone()),
            None => ApiError::UnknownKey,
        },
    };
    Err(wrong_key(state, "clients", peer, error).await)
}

fn by_certificate<'a>(settings: &'a Settings, sender: &Sender) -> Option<&'a Caller> {
    settings.certificates.find(sender.certificate.as_ref()?.names())
}

/// Returns who sent a request to the operators' listener; `None` if it has neither a known token nor, without
/// a token, a known certificate. An unknown token is not counted here.
///
/// # Errors
/// [`ApiError::InvalidRequest`] for two tokens, [`ApiError::NotOperator`] for a token that is valid and gives
/// no role, [`ApiError::WrongToken`] for one that is signed and not valid, [`ApiError::KeysBusy`] or
/// [`ApiError::NoKeySet`].
pub(crate) async fn operator_of(
    state: &State,
    headers: &HeaderMap,
    sender: &Sender,
) -> Result<Option<Operator>, ApiError> {
    let Some(given) = bearer(headers)? else {
        let certificate = sender.certificate.as_ref();
        let owner = certificate.and_then(|own| state.settings.operator_certificates.find(own.names()));
        return Ok(owner.cloned());
    };
    match token(state, given).await {
        Some(Ok(verified)) => return verified.operator.clone().map(Some).ok_or(ApiError::NotOperator),
        Some(Err(TokenError::Wrong(_))) => return Ok(None),
        Some(Err(TokenError::MayNot(_))) => return Err(ApiError::NotOperator),
        Some(Err(error)) => return Err(refused(error)),
        None => {}
    }
    Ok(owner(state, &state.settings.operators, given, sender.address).await?.cloned())
}

/// Verifies a token of the identity server; `None` without such a server, or if the text is not a token.
async fn token(state: &State, given: &str) -> Option<Result<Arc<Verified>, TokenError>> {
    let verifier = state.jwt.as_ref().filter(|_| is_token(given))?;
    Some(verifier.verify(given).await)
}

fn refused(error: TokenError) -> ApiError {
    match error {
        TokenError::Wrong(reason) | TokenError::Invalid(reason) => ApiError::WrongToken(reason),
        TokenError::MayNot(reason) => ApiError::TokenMayNot(reason),
        TokenError::NoKeys => ApiError::NoKeySet,
    }
}

/// Returns the owner of a key; `None` for an unknown one.
async fn owner<'a, T>(
    state: &State,
    keys: &'a Keys<T>,
    given: &str,
    peer: IpAddr,
) -> Result<Option<&'a T>, ApiError> {
    let key = match keys.find(given) {
        Found::Known(owner) => return Ok(Some(owner)),
        Found::Unknown => return Ok(None),
        Found::Unverified(key) => key,
    };
    let delay = state.bad_keys.is_slowed(peer).then_some(DELAY);
    let verdict = state.slow_keys.verify(given, &key.phc, network(peer), delay).await;
    let is_key = verdict.map_err(|_| ApiError::KeysBusy)?;
    Ok(is_key.then_some(&key.owner))
}

/// Returns the tenant that a trusted proxy names. The header of anyone else is ignored.
fn named_by_proxy(
    settings: &Settings,
    headers: &HeaderMap,
    peer: IpAddr,
) -> Result<Option<Tenant>, ApiError> {
    let Some(header) = &settings.tenant_header else { return Ok(None) };
    if !settings.is_trusted_proxy(peer) {
        return Ok(None);
    }
    let mut values = headers.get_all(header).iter();
    let Some(first) = values.next() else { return Ok(None) };
    let name = std::str::from_utf8(first.as_bytes()).ok().filter(|name| name.len() <= MAX_TENANT);
    match (name, values.next()) {
        (Some(name), None) => {
            Ok((!name.is_empty()).then(|| Tenant::new(name, settings.measure.salt.expose())))
        }
        _ => Err(ApiError::InvalidRequest(format!(
            "reading the tenant: the header `{header}` has to be there once, with at most {MAX_TENANT} bytes of UTF-8"
        ))),
    }
}

/// Counts a wrong key and returns its `error`, or another one after a delay when `peer` sent many. A trusted
/// proxy sends those of many clients.
pub(crate) async fn wrong_key(
    state: &State,
    listener: &'static str,
    peer: IpAddr,
    error: ApiError,
) -> ApiError {
    state.metrics.wrong_key(listener);
    let is_of_many = listener == "clients" && state.settings.is_trusted_proxy(peer);
    if is_of_many || !state.bad_keys.note(peer) {
        return error;
    }
    tokio::time::sleep(DELAY).await;
    ApiError::TooManyWrongKeys
}
