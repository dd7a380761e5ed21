//! The connections to the API server. Each watch has one of its own, because the client speaks HTTP/1.

use std::time::Duration;

use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use kube::client::{Body, ConfigExt};
use tower::{BoxError, ServiceBuilder};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// After this time without data, the kernel asks whether the other side is still there,
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
/// repeats the question after this time,
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
/// and gives the connection up after this many questions without an answer.
const KEEPALIVE_RETRIES: u32 = 3;
/// How long data may stay unacknowledged.
#[cfg(target_os = "linux")]
const UNACKNOWLEDGED: Duration = Duration::from_secs(25);

/// A client whose connections end within half a minute when the other side has vanished without a word.
pub(super) fn open(config: kube::Config) -> Result<kube::Client, kube::Error> {
    if config.proxy_url.is_some() {
        // An error that names the proxy.
        return kube::Client::try_from(config);
    }
    let mut tcp = HttpConnector::new();
    tcp.enforce_http(false);
    tcp.set_nodelay(true);
    tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
    tcp.set_keepalive(Some(KEEPALIVE_IDLE));
    tcp.set_keepalive_interval(Some(KEEPALIVE_INTERVAL));
    tcp.set_keepalive_retries(Some(KEEPALIVE_RETRIES));
    #[cfg(target_os = "linux")]
    tcp.set_tcp_user_timeout(Some(UNACKNOWLEDGED));
    let https = config.rustls_https_connector_with_connector(tcp)?;
    let client: Client<_, Body> = Client::builder(TokioExecutor::new()).build(https);
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer()?)
        .layer(config.extra_headers_layer()?)
        .map_err(BoxError::from)
        .service(client);
    Ok(kube::Client::new(service, config.default_namespace))
}
