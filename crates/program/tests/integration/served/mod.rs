//! Commands against a datastore that the test serves.

mod calico_etcd;
mod calicoctl;
mod chart;
mod checks;
mod cluster;
mod datastore;
mod diff;
mod get;
mod install;
mod ipam;
mod kubernetes;
mod leaving_calico;
mod manifests;
mod modify;
mod pool;
mod store;
mod support;
mod version;
mod wait;
