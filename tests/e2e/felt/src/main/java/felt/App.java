package felt;

import jakarta.persistence.Entity;
import jakarta.persistence.GeneratedValue;
import jakarta.persistence.Id;
import java.util.List;
import org.springframework.boot.SpringApplication;
import org.springframework.boot.autoconfigure.SpringBootApplication;
import org.springframework.data.jpa.repository.JpaRepository;
import org.springframework.web.bind.annotation.GetMapping;
import org.springframework.web.bind.annotation.RestController;

@SpringBootApplication
public class App {
  public static void main(String[] args) {
    SpringApplication.run(App.class, args);
  }
}

@Entity
class Order {
  @Id @GeneratedValue Long id;
  String item;
}

interface Orders extends JpaRepository<Order, Long> {
  List<Order> findByItem(String item);
}

@RestController
class Shop {
  private final Orders orders;

  Shop(Orders orders) {
    this.orders = orders;
  }

  @GetMapping("/orders")
  long count() {
    return orders.count();
  }
}
