//! Health checks of gRPC: `liveness`, `readiness` and the service of the picker.

use std::pin::Pin;

use futures_util::Stream;
use tonic::{Request, Response, Status};
use tonic_health::pb::{
    HealthCheckRequest, HealthCheckResponse,
    health_check_response::ServingStatus,
    health_server::{Health as HealthApi, HealthServer},
};

use crate::EXT_PROC_SERVICE;

/// Tells whether an endpoint could be picked now.
pub trait Health: Send + Sync + 'static {
    /// Returns whether the picker is ready.
    fn is_ready(&self) -> bool;
}

/// Returns the service of health checks.
pub fn health_service<H: Health>(health: H) -> HealthServer<impl HealthApi> {
    HealthServer::new(Checks(health))
}

struct Checks<H>(H);

#[tonic::async_trait]
impl<H: Health> HealthApi for Checks<H> {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    async fn check(
        &self,
        request: Request<HealthCheckRequest>,
    ) -> Result<Response<HealthCheckResponse>, Status> {
        let is_serving = match request.get_ref().service.as_str() {
            "liveness" => true,
            "" | "readiness" | EXT_PROC_SERVICE => self.0.is_ready(),
            _ => {
                let known = format!("unknown service: expected liveness, readiness or {EXT_PROC_SERVICE}");
                return Err(Status::not_found(known));
            }
        };
        let status = if is_serving { ServingStatus::Serving } else { ServingStatus::NotServing };
        Ok(Response::new(HealthCheckResponse { status: status.into() }))
    }

    async fn watch(
        &self,
        _request: Request<HealthCheckRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        // Clients that get this status poll `check` instead.
        Err(Status::unimplemented("Watch is not offered: use Check"))
    }
}
