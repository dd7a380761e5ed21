//! Generates the client and server of the store's service from the description below; no protoc is needed.

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
        .method(method("watch", "Watch", "WatchRequest", "WatchMessage").server_streaming().build())
        .build();
    Builder::new().compile(&[service]);
}
