//! Prints the controller's OpenAPI document, as `godwit api spec` does, without building the rest of Godwit.

fn main() {
    print!("{}", godwit_api::openapi::text());
}
