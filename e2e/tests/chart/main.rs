//! The Helm chart: its rendered objects, the values that it refuses, and its acceptance by a real API server.

mod alerts;
mod api_server;
mod dashboards;
mod helm;
mod plugin;
mod refusals;
mod rendered;
mod rights;
mod server;
