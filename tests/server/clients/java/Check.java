import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublisher;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse.BodyHandlers;
import java.io.ByteArrayInputStream;
import java.nio.charset.StandardCharsets;

/** Sends a chat with the JDK's client as it is: with a length, in chunks and as a stream. Prints status and body size. */
public class Check {
    static final String URL_PATH = "/v1/chat/completions";

    public static void main(String[] arguments) throws Exception {
        String body = "{\"model\": \"" + arguments[1] + "\", \"max_tokens\": 5, \"ignore_eos\": true, \"stream\": %s, "
            + "\"messages\": [{\"role\": \"user\", \"content\": \"hello\"}]}";
        byte[] whole = String.format(body, "false").getBytes(StandardCharsets.UTF_8);
        byte[] streamed = String.format(body, "true").getBytes(StandardCharsets.UTF_8);
        HttpClient client = HttpClient.newHttpClient();
        send(client, arguments[0], BodyPublishers.ofByteArray(whole));
        send(client, arguments[0], BodyPublishers.ofInputStream(() -> new ByteArrayInputStream(whole)));
        send(client, arguments[0], BodyPublishers.ofByteArray(streamed));
    }

    static void send(HttpClient client, String url, BodyPublisher publisher) throws Exception {
        HttpRequest request = HttpRequest.newBuilder(URI.create(url + URL_PATH))
            .header("content-type", "application/json").POST(publisher).build();
        var response = client.send(request, BodyHandlers.ofString());
        String last = response.body().strip();
        System.out.println(response.statusCode() + " " + last.substring(Math.max(0, last.length() - 60)).replace("\n", " "));
    }
}
