//! Sockets of all listeners.

use std::net::TcpListener;

use super::{
    check, ext_proc,
    ext_proc::{PickerListener, PickerSocket},
    listen::{ADMIN_SEND_BUFFER, BoundSocket, CLIENT_SEND_BUFFER, bind_or_inherit, cannot_listen},
    service_manager::InheritedSockets,
};
use crate::config::{Problem, settings::Settings};

/// The bound sockets. They do not listen yet.
pub(super) struct Sockets {
    pub(super) clients: BoundSocket,
    pub(super) admin: BoundSocket,
    pub(super) picker: Option<PickerSocket>,
}

impl Sockets {
    /// Binds all of them, or takes those of the service manager.
    ///
    /// # Errors
    /// Every address that is taken or not allowed, and too many data threads.
    pub(super) fn bind(settings: &Settings, inherited: InheritedSockets) -> Result<Self, Vec<Problem>> {
        let server = &settings.server;
        let clients = bind_or_inherit(inherited.clients, server.listen, CLIENT_SEND_BUFFER);
        let clients = clients.map_err(cannot_listen("server.listen"));
        let admin = bind_or_inherit(inherited.admin, server.admin_listen, ADMIN_SEND_BUFFER);
        let admin = admin.map_err(cannot_listen("server.admin_listen"));
        let picker = check::threads(server).map_or_else(|| ext_proc::socket(&settings.ext_proc), Err);
        match (clients, admin, picker) {
            (Ok(clients), Ok(admin), Ok(picker)) => Ok(Self { clients, admin, picker }),
            (clients, admin, picker) => {
                Err(clients.err().into_iter().chain(admin.err()).chain(picker.err()).collect())
            }
        }
    }
}

/// Listens for clients and for proxies.
///
/// # Errors
/// Another process listens at an address since it was bound.
pub(super) fn listen(
    clients: BoundSocket,
    picker: Option<PickerSocket>,
) -> Result<(TcpListener, Option<PickerListener>), Vec<Problem>> {
    match (clients.listen("server.listen"), picker.map(PickerSocket::listen).transpose()) {
        (Ok(clients), Ok(picker)) => Ok((clients, picker)),
        (clients, picker) => Err(clients.err().into_iter().chain(picker.err()).collect()),
    }
}
