//! The service with limits by role, which hold before a message is decoded: a message costs many times its size in memory.

use std::convert::Infallible;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::future::BoxFuture;
use http::{Request, Response};
use tonic::Status;
use tonic::codegen::{Body, StdError};
use tonic::server::NamedService;
use tower::Service;

use super::client_identity::{Client, Role};
use super::generated::store_server::{Store, StoreServer};
use super::known_store::Told;

/// The maximum size of an answer, in bytes.
pub(super) const MAX_MESSAGE_BYTES: usize = 256 << 20;
/// The longest message of a node. Its agent writes single objects and lists of them, of some hundred bytes each.
const MAX_BYTES_OF_NODE: usize = 4 << 20;
/// The longest message of others, who import whole clusters.
const MAX_BYTES_OF_OTHERS: usize = 64 << 20;

/// The service for clients of all roles.
pub(super) struct Limited<T> {
    of_nodes: StoreServer<T>,
    of_others: StoreServer<T>,
    told: Told,
}

impl<T> Clone for Limited<T> {
    fn clone(&self) -> Self {
        Self { of_nodes: self.of_nodes.clone(), of_others: self.of_others.clone(), told: self.told }
    }
}

impl<T: Store> Limited<T> {
    pub(super) fn new(store: T, told: Told) -> Self {
        let store = Arc::new(store);
        let limited = |limit| {
            StoreServer::from_arc(store.clone())
                .max_decoding_message_size(limit)
                .max_encoding_message_size(MAX_MESSAGE_BYTES)
        };
        Self { of_nodes: limited(MAX_BYTES_OF_NODE), of_others: limited(MAX_BYTES_OF_OTHERS), told }
    }
}

impl<T: Store> NamedService for Limited<T> {
    const NAME: &'static str = StoreServer::<T>::NAME;
}

impl<T: Store, B> Service<Request<B>> for Limited<T>
where
    B: Body + Send + 'static,
    B::Error: Into<StdError> + Send + 'static,
{
    type Response = Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = BoxFuture<'static, Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let role = request.extensions().get::<Arc<Client>>().map(|client| client.role.clone());
        let refused = match &role {
            None => Some(Status::unauthenticated("the client is unknown")),
            Some(role) => role.refusal().map(Status::permission_denied),
        };
        let refused = refused.or_else(|| self.told.refusal(request.headers()));
        let answer: Self::Future = match (refused, role) {
            (Some(refused), _) => Box::pin(async move { Ok(refused.into_http()) }),
            (None, Some(Role::Node(_))) => self.of_nodes.call(request),
            (None, _) => self.of_others.call(request),
        };
        let told = self.told;
        Box::pin(async move {
            let mut answer = answer.await?;
            told.add(answer.headers_mut());
            Ok(answer)
        })
    }
}
