//! Generates the client and server of the store's service, and clients of etcd's services, from the descriptions below; no
//! protoc is needed.

use tonic_build::manual::{Builder, Method, Service};

fn main() {
    let method = |name: &str, route: &str, input: &str, output: &str| {
        Method::builder()
            .name(name)
            .route_name(route)
            .input_type(format!("crate::rpc::message::{input}"))
            .output_type(format!("crate::rpc::message::{output}"))
            .codec_path("tonic_prost::ProstCodec")
    };
    let service = Service::builder()
        .name("Store")
        .package("tortie.store.v1")
        .method(method("get", "Get", "GetRequest", "GetReply").build())
        .method(method("list", "List", "ListRequest", "ListReply").build())
        .method(method("write", "Write", "WriteRequest", "WriteReply").build())
        .method(method("barrier", "Barrier", "BarrierRequest", "BarrierReply").build())
        .method(method("backup", "Backup", "BackupRequest", "BackupReply").server_streaming().build())
        .method(method("watch", "Watch", "WatchRequest", "EncodedEvent").server_streaming().build())
        .build();
    Builder::new().compile(&[service, kv(), watch(), lease(), auth()]);
}

/// A method of etcd's API (`api/etcdserverpb/rpc.proto`).
fn of_etcd(name: &str, route: &str, input: &str, output: &str) -> tonic_build::manual::MethodBuilder {
    Method::builder()
        .name(name)
        .route_name(route)
        .input_type(format!("crate::etcd::message::{input}"))
        .output_type(format!("crate::etcd::message::{output}"))
        .codec_path("tonic_prost::ProstCodec")
}

fn kv() -> Service {
    Service::builder()
        .name("KV")
        .package("etcdserverpb")
        .method(of_etcd("range", "Range", "RangeRequest", "RangeResponse").build())
        .method(of_etcd("txn", "Txn", "TxnRequest", "TxnResponse").build())
        .build()
}

fn watch() -> Service {
    let watch = of_etcd("watch", "Watch", "WatchCall", "WatchResponse");
    Service::builder()
        .name("Watch")
        .package("etcdserverpb")
        .method(watch.client_streaming().server_streaming().build())
        .build()
}

fn lease() -> Service {
    Service::builder()
        .name("Lease")
        .package("etcdserverpb")
        .method(of_etcd("lease_grant", "LeaseGrant", "LeaseGrantRequest", "LeaseGrantResponse").build())
        .method(of_etcd("lease_revoke", "LeaseRevoke", "LeaseRevokeRequest", "LeaseRevokeResponse").build())
        .build()
}

fn auth() -> Service {
    let authenticate = of_etcd("authenticate", "Authenticate", "AuthenticateRequest", "AuthenticateResponse");
    Service::builder().name("Auth").package("etcdserverpb").method(authenticate.build()).build()
}
