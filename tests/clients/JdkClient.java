import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;

/** Java's own client with its defaults: it offers HTTP/2 in every first request. */
public class JdkClient {
    public static void main(String[] arguments) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        HttpRequest request = HttpRequest.newBuilder(URI.create(arguments[0] + "/v1/completions"))
            .header("content-type", "application/json")
            .POST(HttpRequest.BodyPublishers.ofString("{\"prompt\": \"a\", \"max_tokens\": 2}"))
            .build();
        for (int i = 0; i < 2; i++) {
            HttpResponse<String> response = client.send(request, HttpResponse.BodyHandlers.ofString());
            if (response.statusCode() != 200 || !response.body().contains("total_tokens")) {
                System.err.println(response.statusCode() + " " + response.body());
                System.exit(1);
            }
        }
    }
}
